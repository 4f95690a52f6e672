"""The picture of `meshwright monitor`: lines of text that fit the terminal, in colours or with characters only."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.text import Text

from meshwright.cli.incidents import incident_lines
from meshwright.cli.monitor_experts import expert_lines
from meshwright.observe import number_text

if TYPE_CHECKING:
    from meshwright.diagnosis.heat_map import HeatMap, Range
    from meshwright.launch.rank_view import RankActivity
    from meshwright.launch.run_snapshot import RunSnapshot

LEVELS = (
    (0.95, "blue", "-", "<0.95"),
    (1.05, "green", ".", "1"),
    (1.15, "yellow", "o", ">1.05"),
    (1.3, "dark_orange", "O", ">1.15"),
    (2.0, "red", "#", ">1.3"),
    (float("inf"), "magenta", "@", ">2"),
)
"""Ranges of a rank's compute time divided by the median of the ranks.

Each entry has the upper bound of the range, its colour, its character for terminals without colours, and its text in
the legend.
"""
LEAST_HEAT_ROWS = 3
"""Lines that the heat map gets at least."""
MOST_HEAT_ROWS = 32
"""Maximum number of lines of the heat map."""
LISTED_STATES = 8
"""Maximum number of lines about what ranks do."""
LISTED_WAITS = 6
"""Maximum number of lines about ranks that wait."""


def frame(snapshot: RunSnapshot, console: Console) -> Group:
    """Draw the picture in the size of `console`, with one line less than its height so that the terminal does not scroll.

    The sections from top to bottom: figures, heat map, loads of experts, states of ranks, waits, incidents. If they do
    not fit, the longest of the last three are shortened first.
    """
    width = console.size.width
    height = max(1, console.size.height - 1)
    colours = console.color_system is not None and not console.no_color
    top = _figure_lines(snapshot, width)
    states = _titled("ranks", _state_lines(snapshot, LISTED_STATES))
    waits = _titled("waiting", _wait_lines(snapshot, LISTED_WAITS))
    incidents = _titled("incidents", _incident_text(snapshot))
    below = [states, waits, incidents]
    loads = expert_lines(snapshot.expert_loads, (height - len(top)) // 3, width, colours=colours)
    height -= len(loads)
    heat_rows = min(MOST_HEAT_ROWS, max(len(snapshot.seconds), 1))
    _shorten(below, height - len(top) - 3 - min(heat_rows, max(LEAST_HEAT_ROWS, height // 3)))
    free = height - len(top) - 3 - sum(map(len, below))
    heat = _heat_lines(snapshot, max(LEAST_HEAT_ROWS, min(heat_rows, free)), width, colours=colours)
    lines = [*top, *heat, *loads, *states, *waits, *incidents]
    height += len(loads)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines[:height])


def _figure_lines(snapshot: RunSnapshot, width: int) -> list[Text]:
    """Return the lines at the top: name and state of the run, progress bar of the steps, and the figures."""
    figures = snapshot.figures
    attempt = f", attempt {figures.attempt}" if figures.attempt > 1 else ""
    title = Text.assemble((figures.name, "bold"), f"  {figures.state}{attempt}")
    moment = f"{datetime.now():%H:%M:%S}"
    title.append(moment.rjust(max(1, width - len(title))), "dim")
    counted = f"step {figures.step:,}" + (f" of {figures.steps:,}" if figures.steps else "")
    left = (
        ""
        if figures.seconds_left is None or not figures.running
        else f"  {number_text.clock(figures.seconds_left)} left"
    )
    share = figures.step / figures.steps if figures.steps else 0.0
    size = max(0, width - len(counted) - len(left) - 11)
    filled = round(size * min(1.0, share))
    bar = Text.assemble(counted, "  [", ("=" * filled, "blue"), " " * (size - filled), f"] {share:4.0%}", (left, "dim"))
    values = (
        ("tok/s", figures.tokens_per_second, number_text.short),
        ("MFU", figures.mfu, number_text.percent),
        ("goodput", figures.goodput, number_text.percent),
        ("step", figures.step_seconds, number_text.duration),
        ("loss", figures.loss, "{:.4f}".format),
        ("val", figures.validation_loss, "{:.4f}".format),
        ("grad", figures.grad_norm, "{:.3g}".format),
        ("checkpoint", figures.checkpoint_step, "{:,}".format),
        ("restarts", figures.restarts, str),
    )
    lines = [Text()]
    for name, value, form in values:
        cell = Text.assemble((f"{name} ", "dim"), "-" if value is None else form(value))  # pyrefly: ignore
        if len(lines[-1]) + len(cell) + 2 > width:
            lines.append(Text())
        lines[-1].append("  " if len(lines[-1]) else "").append_text(cell)
    return [title, bar, *lines]


def _heat_lines(snapshot: RunSnapshot, lines: int, width: int, *, colours: bool) -> list[Text]:
    """Return the heat map of compute times: a title with the legend, the map, and below it the first and last step."""
    ranks = len(snapshot.seconds)
    title = Text.assemble(("compute time / median", "bold"))
    label = len(_range_text((max(0, ranks - lines), max(0, ranks - 1)))) + 6
    heat = snapshot.heat_map(lines, width - label)
    if not heat.steps:
        return [title, Text("  no spans yet", "dim")]
    title.append("  ").append_text(_legend(colours=colours))
    return [title, *_heat_rows(heat, label, colours=colours), _axis(heat, label)]


def _heat_rows(heat: HeatMap, label: int, *, colours: bool) -> list[Text]:
    """Return the lines of the heat map, each with the ranks that it shows. `label` is the width of that label in characters."""
    lines = []
    for ranks, values in zip(heat.ranks, heat.ratio.tolist(), strict=True):
        line = Text.assemble((f"rank {_range_text(ranks)}".ljust(label), "dim"))
        for level, same in groupby(values, _level):
            line.append_text(_cells(level, len(list(same)), colours=colours))
        lines.append(line)
    return lines


def _axis(heat: HeatMap, label: int) -> Text:
    """Return the line below the map: its first and last step, and what one cell stands for."""
    first = f"{heat.steps[0][0]:,}"
    last = f"{heat.steps[-1][1]:,}"
    groups = (max(last - first + 1 for first, last in numbers) for numbers in (heat.ranks, heat.steps))
    ranks, steps = groups
    parts = [f"slowest of {ranks} ranks"] * (ranks > 1) + [f"mean of {steps} steps"] * (steps > 1)
    text = f"{first} … {last}" if len(heat.steps) > 1 else first
    return Text("step ".ljust(label) + text + (f"   a cell: {', '.join(parts)}" if parts else ""), "dim")


def _legend(*, colours: bool) -> Text:
    legend = Text()
    for level, (*_, text) in enumerate(LEVELS):
        legend.append_text(_cells(level, 1, colours=colours)).append(f" {text}  ", "dim")
    return legend


def _level(ratio: float) -> int | None:
    """Return the number of the level to which a ratio belongs. None if the ratio is NaN, that is unknown."""
    if ratio != ratio:
        return None
    return next((index for index, level in enumerate(LEVELS) if ratio < level[0]), len(LEVELS) - 1)


def _cells(level: int | None, count: int, *, colours: bool) -> Text:
    if level is None:
        return Text(" " * count)
    _, colour, character, _ = LEVELS[level]
    return Text(" " * count, f"on {colour}") if colours else Text(character * count)


def _state_lines(snapshot: RunSnapshot, most: int) -> list[Text]:
    """Return at most `most` lines about what ranks do.

    Ranks in the same state share a line. The ranks with the lowest step come first.
    """
    ranks = snapshot.ranks
    if not ranks:
        return [Text("  not known yet", "dim")]
    groups = _grouped(ranks, actions=True)
    if len(groups) > most:
        groups = _grouped(ranks, actions=False)
    lines = [_state_line(group, exact=len({rank.action for rank in group}) == 1) for group in groups[:most]]
    if snapshot.progress_seconds is not None and snapshot.progress_seconds > 5:
        lines.insert(0, Text(f"  as of {snapshot.progress_seconds:.0f} s ago", "dim"))
    return lines + [Text(f"  and {len(groups) - most} more groups", "dim")] * (len(groups) > most)


def _grouped(ranks: Sequence[RankActivity], *, actions: bool) -> list[list[RankActivity]]:
    """Group ranks in the same step and phase; with `actions` also by what they do. The groups with the lowest step come first."""
    groups: dict[tuple[object, ...], list[RankActivity]] = {}
    for rank in ranks:
        key = (rank.step, rank.phase, rank.note.partition(" ")[0], *((rank.action, rank.note) if actions else ()))
        groups.setdefault(key, []).append(rank)
    return sorted(groups.values(), key=lambda group: (group[0].step, -(group[0].seconds or 0.0)))


def _state_line(group: Sequence[RankActivity], *, exact: bool) -> Text:
    """Return one line about a group of ranks. With `exact`, all of them do the same, which the line names."""
    first = group[0]
    longest = max((rank.seconds for rank in group if rank.seconds is not None), default=None)
    parts = [f"step {first.step:,}", first.phase, first.action if exact else "various actions", first.note]
    since = f" for {longest:.0f} s" if longest is not None and longest >= 1 else ""
    numbers = _numbers_text([rank.rank for rank in group])
    return Text(f"  {numbers:<14} {'  '.join(part for part in parts if part)}{since}")


def _wait_lines(snapshot: RunSnapshot, most: int) -> list[Text]:
    """Return the rank for which others wait, and the ranks that wait for it."""
    culprit = snapshot.culprit
    if culprit is None:
        if snapshot.progress_seconds is None:
            return [
                Text(
                    "  not running" if not snapshot.figures.running else "  not known: the job is not supervised", "dim"
                )
            ]
        return [Text("  no rank holds up others", "dim")]
    groups: dict[tuple[int, str], list[int]] = {}
    for wait in culprit.waiting:
        groups.setdefault((wait.for_rank, wait.needs), []).append(wait.rank)
    lines = [Text(f"  {culprit.confidence}: {culprit.reason}", "bold red")]
    lines += [
        Text(f"  {_numbers_text(sorted(ranks))} -> rank {rank}: {needs}") for (rank, needs), ranks in groups.items()
    ]
    more = len(lines) - most
    return lines[:most] + [Text(f"  and {more} more", "dim")] * (more > 0)


def _incident_text(snapshot: RunSnapshot) -> list[Text]:
    """Return the lines about all incidents, the newest first."""
    lines = [line for record in reversed(snapshot.incidents) for line in incident_lines(record)]
    return [Text(f"  {line}") for line in lines] or [Text("  none", "dim")]


def _titled(title: str, lines: list[Text]) -> list[Text]:
    return [Text(title, "bold"), *lines]


def _shorten(sections: list[list[Text]], height: int) -> None:
    """Remove lines from the ends of the longest sections until the sections have at most `height` lines together.

    Each section keeps its title and one line, so they may still have more.
    """
    while sum(map(len, sections)) > height:
        longest = max(reversed(sections), key=len)
        if len(longest) <= 2:
            return
        del longest[-1]


def _range_text(numbers: Range) -> str:
    first, last = numbers
    return str(first) if first == last else f"{first}-{last}"


def _numbers_text(numbers: Sequence[int], most: int = 14) -> str:
    """Return ranks as ranges, such as `0-3,8`. A text longer than `most` characters is cut at a comma."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ",".join(_range_text((first, last)) for first, last in ranges)
    return text if len(text) <= most else f"{text[: most - 1].rpartition(',')[0]},…"
