"""Bands of predicted step times by class of run: quantiles of ln(measured ÷ predicted) over runs whose source was left out of the fit.

The bands are conformal: the class's own errors on sources that the constants have not seen set the ends, 10% of them beyond each. Days,
hours and cost of a training are in proportion to the step, so they have the same band.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

COVERED = 0.8
"""Share of runs between the ends of a band."""
MIN_RUNS = 20
MIN_SOURCES = 3
"""Fewest runs and sources of a class with a band of its own; others take that of a wider class."""
SOURCE_WEIGHT = 0.35
"""Runs of a source of n runs weigh n^-SOURCE_WEIGHT each: 1 counts sources alike, 0 counts runs alike.

One source of a thousand runs tells less about the next source than ten of ten runs, and 80% of all runs must be inside.
"""
LEAST_RUNS = 3
"""Runs of a software from which its own constants say something about its next run."""
Band = tuple[float, float]
Known = Literal["measured", "related", "unknown"]
"""What the constants of a software follow: many of its own runs; a few, or those of a related software; neither."""


@dataclass(frozen=True)
class RunClass:
    """What decides how well a run is predicted."""

    several_hosts: bool
    moe: bool
    measured_generation: bool
    """Whether constants of its device generation follow many runs."""
    software: Known

    @property
    def name(self) -> str:
        return ", ".join(self._words())

    def _words(self) -> list[str]:
        return [
            "several hosts" if self.several_hosts else "one host",
            "mixture" if self.moe else "dense",
            f"{self.software} software",
            ("measured" if self.measured_generation else "unmeasured") + " generation",
        ]

    def names(self) -> Iterator[str]:
        """Its name, then those of the wider classes that it belongs to."""
        words = self._words()
        yield from (", ".join(words[:count]) for count in (4, 3))
        yield ", ".join((words[0], words[2]))
        yield words[2]
        yield "all"


def known(stack: str, parent: str, runs: Mapping[str, int], measured_with: Sequence[str]) -> Known:
    """How far a set of constants is known: `runs` of each set, and those that are `measured_with` many."""
    if stack in measured_with:
        return "measured"
    few = stack != "default" and runs.get(stack, 0) >= LEAST_RUNS
    return "related" if few or parent not in ("", "default") else "unknown"


def band_of(run: RunClass, bands: Mapping[str, Sequence[float]]) -> Band:
    """Logarithms of the ends of the band of the narrowest class that has one."""
    low, high = next(bands[name] for name in run.names() if name in bands)
    return low, high


def fitted_bands(classes: Sequence[RunClass], sources: Sequence[str], residuals: np.ndarray) -> dict[str, list[float]]:
    """The band of each class, and of wider ones, from ln(measured ÷ predicted) of runs of left-out sources (`SOURCE_WEIGHT`)."""
    members: dict[str, list[int]] = {}
    for index, run in enumerate(classes):
        for name in run.names():
            members.setdefault(name, []).append(index)
    bands = {}
    for name, indices in sorted(members.items()):
        runs_by_source = Counter(sources[index] for index in indices)
        if name == "all" or (len(indices) >= MIN_RUNS and len(runs_by_source) >= MIN_SOURCES):
            weights = np.array([runs_by_source[sources[index]] ** -SOURCE_WEIGHT for index in indices])
            bands[name] = conformal_band(residuals[indices], weights)
    return bands


def conformal_band(residuals: np.ndarray, weights: np.ndarray) -> list[float]:
    """Ends between which `COVERED` of the weight of the residuals lies, with half of the rest beyond each."""
    order = np.argsort(residuals)
    middle = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    beyond = (1 - COVERED) / 2
    return [float(f"{end:.4f}") for end in np.interp([beyond, 1 - beyond], middle, residuals[order])]
