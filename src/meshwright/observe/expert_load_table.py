"""Loads of the experts in the newest recorded steps, relative to the mean of their layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.observe.runfolder import Record

MOST_STEPS = 10
"""Number of recorded steps, the newest ones, whose loads are added up."""


@dataclass(frozen=True)
class ExpertLoadTable:
    """Loads of all experts over the newest steps.

    `ratio[layer][expert]` is the expert's load divided by the mean load in its layer; only layers with experts count.
    `last_step` is the newest step.
    """

    ratio: Sequence[Sequence[float]]
    steps: int
    """Number of recorded steps that were added up."""
    last_step: int

    @property
    def busiest(self) -> tuple[int, int]:
        """Layer and expert with the largest ratio, both counted from 0."""
        layer = max(range(len(self.ratio)), key=lambda layer: max(self.ratio[layer]))
        return layer, max(range(len(self.ratio[layer])), key=lambda expert: self.ratio[layer][expert])


def expert_load_table(records: Sequence[Record]) -> ExpertLoadTable | None:
    """Return the table of the newest steps in `records`, the lines of metrics.jsonl; None if no step has loads."""
    recorded = [record for record in records if is_table(record.get("expert_loads"))][-MOST_STEPS:]
    if not recorded:
        return None
    last = recorded[-1]["expert_loads"]
    recorded = [record for record in recorded if _shape(record["expert_loads"]) == _shape(last)]
    ratios = [_ratios([record["expert_loads"][layer] for record in recorded]) for layer in range(len(last))]
    return ExpertLoadTable(ratios, len(recorded), recorded[-1]["step"])


def is_table(value: Any) -> bool:
    """Whether this is a non-empty list of non-empty lists of numbers, all equally long. Someone may have edited the file."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(line, list) and line and len(line) == len(value[0]) for line in value)
        and all(isinstance(number, (int, float)) for line in value for number in line)
    )


def _ratios(layer: Sequence[Sequence[float]]) -> list[float]:
    """Return the loads of one layer's experts, added over steps and divided by their mean. `layer` is (steps, experts)."""
    sums = [sum(values) for values in zip(*layer, strict=True)]
    mean = sum(sums) / len(sums)
    return [value / mean if mean else 1.0 for value in sums]


def _shape(table: Sequence[Sequence[float]]) -> tuple[int, int]:
    return len(table), len(table[0])
