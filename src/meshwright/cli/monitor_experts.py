"""The monitor's picture of expert loads: one line for each MoE layer, one cell for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.text import Text

from meshwright.observe import number_text
from meshwright.observe.expert_load_table import ExpertLoadTable

LEVELS = (
    (0.5, "blue", "_", "<0.5"),
    (0.9, "cyan", "-", "<0.9"),
    (1.1, "green", ".", "1"),
    (1.5, "yellow", "o", ">1.1"),
    (2.0, "dark_orange", "O", ">1.5"),
    (4.0, "red", "#", ">2"),
    (float("inf"), "magenta", "@", ">4"),
)
"""Ranges of an expert's load divided by the mean load of its layer.

Each entry has the upper bound of the range, its colour, its character for terminals without colours, and its text in
the legend.
"""
LEAST_LINES = 3
"""Minimum number of lines that the picture needs: the title, one line for layers, and the numbers of the experts below."""


def expert_lines(table: ExpertLoadTable | None, height: int, width: int, *, colours: bool) -> list[Text]:
    """Return the picture in at most `height` lines of `width` characters. Empty if there are no loads or too few lines.

    If there is not enough space, one cell stands for several layers or experts and shows the largest of their loads.
    With `colours`, a cell is a coloured space, otherwise a character.
    """
    if table is None or height < LEAST_LINES:
        return []
    layers = len(table.ratio)
    experts = len(table.ratio[0])
    label = len(f"MoE {layers}-{layers}") + 2
    layer_groups = _ranges(layers, height - 2)
    columns = _ranges(experts, max(1, width - label))
    busiest_layer, busiest_expert = table.busiest
    finding = f"  expert {busiest_expert} of MoE layer {busiest_layer + 1}: "
    finding += f"{number_text.short(table.ratio[busiest_layer][busiest_expert])} ×"
    title = Text.assemble(("expert load / mean", "bold"), finding, "  ")
    for _, colour, character, text in LEVELS:
        title.append_text(_cells(colour, character, 1, colours=colours)).append(f" {text}  ", "dim")
    lines = [title]
    for first, end in layer_groups:
        numbers = f"{first + 1}" if end == first + 1 else f"{first + 1}-{end}"
        line = Text.assemble((f"MoE {numbers}".ljust(label), "dim"))
        levels = (_level(max(max(values[left:right]) for values in table.ratio[first:end])) for left, right in columns)
        for (_, colour, character, _), same in groupby(levels, lambda level: LEVELS[level]):
            line.append_text(_cells(colour, character, len(list(same)), colours=colours))
        lines.append(line)
    group = max(right - left for left, right in columns)
    note = f"   a cell: most of {group} experts" if group > 1 else ""
    return [*lines, Text("expert ".ljust(label) + f"0 … {experts - 1}{note}", "dim")]


def _ranges(count: int, most: int) -> Sequence[tuple[int, int]]:
    """Divide the numbers 0 … `count` - 1 into at most `most` ranges [first, end) of equal size; the last one may be shorter."""
    size = -(-count // max(1, min(count, most)))
    return [(first, min(first + size, count)) for first in range(0, count, size)]


def _level(ratio: float) -> int:
    return next((index for index, level in enumerate(LEVELS) if ratio < level[0]), len(LEVELS) - 1)


def _cells(colour: str, character: str, count: int, *, colours: bool) -> Text:
    return Text(" " * count, f"on {colour}") if colours else Text(character * count)
