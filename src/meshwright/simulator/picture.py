"""Draws a timeline as text: one line for each rank, with time from left to right. The shortest compute action takes one column.

`F3` is the forward of micro-batch 3, and `B3` its backward. In a split backward, `I3` computes the gradient of the input, and `W3` the
gradients of the weights. Capital letters mean the rank's first stage, small letters its other stages. A dash continues the action to its
left; a dot is idle time.
"""

from __future__ import annotations

from meshwright.schedules.action import COMPUTE, LETTERS, Action
from meshwright.simulator.timeline import Timeline


def draw(timeline: Timeline, column_seconds: float | None = None) -> str:
    """Draw the compute actions of every rank until the end of the last backward. Durations are rounded to whole columns.

    Two stages and two micro-batches, where a backward takes twice as long as a forward:

    >>> from meshwright.schedules.registry import build
    >>> from meshwright.simulator.simulate import simulate
    >>> from meshwright.simulator.timing import uniform_timing
    >>> print(draw(simulate(build("1f1b", 2, 2), uniform_timing(2))))
    0  F0 F1 .  .  B0--- .  B1---
    1  .  F0 B0--- F1 B1--- .  .
    """
    schedule = timeline.schedule
    spans = [(r, a, start, end) for r, _, a, start, end in timeline.records if a.op in COMPUTE]
    column = column_seconds or min(end - start for _, _, start, end in spans if end > start)
    width = len(str(schedule.micro_batches - 1)) + 2
    columns = round(max(end for *_, end in spans) / column)
    lines = [["." + " " * (width - 1)] * columns for _ in range(schedule.ranks)]
    for rank, action, start, end in spans:
        first = round(start / column)
        last = round(end / column)
        text = "&".join(_label(part, schedule.placement[rank][0]) for part in action.parts)
        characters = (last - first) * width
        text = text.ljust(characters - 1, "-")[: characters - 1] + " "
        lines[rank][first:last] = [text[begin : begin + width] for begin in range(0, len(text), width)]
    return _numbered(lines)


def draw_within(timeline: Timeline, characters: int) -> str | None:
    """Draw to scale, in lines of at most `characters` characters. Returns None if an action would be narrower than one character.

    If the schedule has an action for each FSDP unit of a stage, the actions of a stage's units are drawn as one action.
    """
    schedule = timeline.schedule
    rank_width = len(str(schedule.ranks - 1))
    spans = _by_stage(timeline)
    end = max(last for *_, last in spans)
    column = end / (characters - rank_width - 2)
    if characters < rank_width + 12 or min(last - first for _, _, first, last in spans) < column:
        return None
    lines = [["."] * round(end / column) for _ in range(schedule.ranks)]
    for rank, action, begin, finish in spans:
        first = round(begin / column)
        last = round(finish / column)
        text = "&".join(_label(part, schedule.placement[rank][0]) for part in action.parts)
        width = last - first
        # Dashes fill the action's columns up to the last, which stays empty if the text leaves it free.
        text = text[:width].ljust(width - 1, "-").ljust(width)
        lines[rank][first:last] = list(text)
    return _numbered(lines)


def _numbered(lines: list[list[str]]) -> str:
    """Return the text of a picture: the columns of each rank after the rank's number."""
    rank_width = len(str(len(lines) - 1))
    return "\n".join(f"{rank:{rank_width}}  {''.join(line).rstrip()}" for rank, line in enumerate(lines))


def _by_stage(timeline: Timeline) -> list[tuple[int, Action, float, float]]:
    """Return the compute actions as (rank, action, start, end).

    Consecutive actions of a rank that differ only in the FSDP unit become one action.
    """
    merged: list[tuple[int, Action, float, float]] = []
    latest_index: dict[int, int] = {}
    for rank, _, action, start, end in timeline.records:
        if action.op not in COMPUTE:
            continue
        # An action of two micro-batches has an action for each of them in `pair`. Other actions have an empty `pair`.
        pair = tuple(part._replace(unit=None) for part in action.pair)
        of_stage = action._replace(unit=None, pair=pair)
        index = latest_index.get(rank)
        if index is not None and merged[index][1] == of_stage:
            begin = merged[index][2]
            merged[index] = rank, of_stage, begin, end
        else:
            latest_index[rank] = len(merged)
            merged.append((rank, of_stage, start, end))
    return merged


def _label(action: Action, first_stage: int) -> str:
    letter = LETTERS[action.op]
    return f"{letter if action.stage == first_stage else letter.lower()}{action.micro_batch}"
