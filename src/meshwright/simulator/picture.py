"""A timeline as text: a row for each rank, time to the right, one column for the shortest piece of compute.

`F3` is the forward of micro-batch 3, B its backward, I and W the two halves of one. Capitals are the rank's first stage, small
letters its other ones. A dash goes on with what stands before it; a dot is an idle device.
"""

from __future__ import annotations

from meshwright.schedules.action import COMPUTE, LETTERS, Action
from meshwright.simulator.timeline import Timeline


def draw(timeline: Timeline, column_seconds: float | None = None) -> str:
    """The compute of every rank, up to the end of the last backward. Widths are rounded to whole columns."""
    schedule = timeline.schedule
    spans = [(r, a, start, end) for r, _, a, start, end in timeline.records if a.op in COMPUTE]
    column = column_seconds or min(end - start for _, _, start, end in spans if end > start)
    width = len(str(schedule.micro_batches - 1)) + 2
    columns = round(max(end for *_, end in spans) / column)
    rows = [["." + " " * (width - 1)] * columns for _ in range(schedule.ranks)]
    for rank, action, start, end in spans:
        first, last = round(start / column), round(end / column)
        text = "&".join(_label(part, schedule.placement[rank][0]) for part in action.parts)
        text = text.ljust((last - first) * width - 1, "-")[: (last - first) * width - 1] + " "
        rows[rank][first:last] = [text[at : at + width] for at in range(0, len(text), width)]
    name = len(str(schedule.ranks - 1))
    return "\n".join(f"{rank:{name}}  {''.join(row).rstrip()}" for rank, row in enumerate(rows))


def draw_within(timeline: Timeline, characters: int) -> str | None:
    """`draw` to scale in lines of at most `characters`; None if a forward is narrower than one.

    A step in units is drawn by stage.
    """
    schedule = timeline.schedule
    name = len(str(schedule.ranks - 1))
    spans = _by_stage(timeline)
    end = max(last for *_, last in spans)
    column = end / (characters - name - 2)
    if characters < name + 12 or min(last - first for _, _, first, last in spans) < column:
        return None
    rows = [["."] * round(end / column) for _ in range(schedule.ranks)]
    for rank, action, begin, through in spans:
        first, last = round(begin / column), round(through / column)
        text = "&".join(_label(part, schedule.placement[rank][0]) for part in action.parts)
        room = last - first
        rows[rank][first:last] = text[:room].ljust(room - 1, "-").ljust(room)
    return "\n".join(f"{rank:{name}}  {''.join(row).rstrip()}" for rank, row in enumerate(rows))


def _by_stage(timeline: Timeline) -> list[tuple[int, Action, float, float]]:
    """(rank, action, start, end) of compute, with neighbouring units of one stage and micro-batch as one."""
    joined: list[tuple[int, Action, float, float]] = []
    latest: dict[int, int] = {}
    for rank, _, action, start, end in timeline.records:
        if action.op not in COMPUTE:
            continue
        whole = action._replace(unit=None, pair=tuple(part._replace(unit=None) for part in action.pair))
        at = latest.get(rank)
        if at is not None and joined[at][1] == whole:
            joined[at] = rank, whole, joined[at][2], end
        else:
            latest[rank] = len(joined)
            joined.append((rank, whole, start, end))
    return joined


def _label(action: Action, first_stage: int) -> str:
    letter = LETTERS[action.op]
    return f"{letter if action.stage == first_stage else letter.lower()}{action.micro_batch}"
