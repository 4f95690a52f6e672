"""Loads of experts of the newest recorded steps, relative to the mean of their layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.observe.runfolder import Record

MOST_STEPS = 10
"""Newest recorded steps whose loads are added."""


@dataclass(frozen=True)
class ExpertLoadTable:
    """`ratio` has for each layer with experts the loads of its experts over their mean."""

    ratio: Sequence[Sequence[float]]
    steps: int
    """Recorded steps that were added."""
    last_step: int

    @property
    def busiest(self) -> tuple[int, int]:
        """The layer and expert with the largest ratio, from 0."""
        layer = max(range(len(self.ratio)), key=lambda layer: max(self.ratio[layer]))
        return layer, max(range(len(self.ratio[layer])), key=lambda expert: self.ratio[layer][expert])


def expert_load_table(records: Sequence[Record]) -> ExpertLoadTable | None:
    """The table of the newest steps of `records`, in their order; None if no step has loads."""
    recorded = [record for record in records if is_table(record.get("expert_loads"))][-MOST_STEPS:]
    if not recorded:
        return None
    last = recorded[-1]["expert_loads"]
    recorded = [record for record in recorded if _shape(record["expert_loads"]) == _shape(last)]
    ratios = [_ratios([record["expert_loads"][layer] for record in recorded]) for layer in range(len(last))]
    return ExpertLoadTable(ratios, len(recorded), recorded[-1]["step"])


def is_table(value: Any) -> bool:
    """Whether this is a list of equally long, not empty lists of numbers; a line of metrics.jsonl may have been edited."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(line, list) and line and len(line) == len(value[0]) for line in value)
        and all(isinstance(number, (int, float)) for line in value for number in line)
    )


def _ratios(layer: Sequence[Sequence[float]]) -> list[float]:
    """Loads of a layer's experts over their mean, added over steps."""
    sums = [sum(values) for values in zip(*layer, strict=True)]
    mean = sum(sums) / len(sums)
    return [value / mean if mean else 1.0 for value in sums]


def _shape(table: Sequence[Sequence[float]]) -> tuple[int, int]:
    return len(table), len(table[0])
