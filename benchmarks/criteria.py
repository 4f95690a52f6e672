"""Acceptance criteria of benchmarks: a figure and its limit each, printed and kept with the results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Criterion:
    """An acceptance criterion: a figure and its limit."""

    what: str
    reached: float
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        return self.reached >= self.limit if self.at_least else self.reached <= self.limit

    @property
    def entry(self) -> dict[str, Any]:
        """Its entry in a results file."""
        return {**vars(self), "passed": self.passed}


def print_criteria(criteria: Iterable[Criterion]) -> None:
    """Print each criterion with its figure, its limit, and whether it passed."""
    print("\nacceptance")
    for criterion in criteria:
        verdict, sign = "pass" if criterion.passed else "FAIL", "≥" if criterion.at_least else "≤"
        print(f"  {verdict}  {criterion.reached:12.4g} {sign} {criterion.limit:<8g} {criterion.what}")
