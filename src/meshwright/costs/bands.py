"""Uncertainty bands of predicted step times, for each class of runs.

A band contains the measured time of about 80% of the runs. It comes from the errors ln(measured ÷ predicted) of runs from sources that were
left out when the constants were fitted: 10% of these errors are below the band, and 10% are above (a conformal prediction). Days, hours
and cost of a training are proportional to the step time, so they have the same band.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

COVERED = 0.8
"""Share of the runs inside a band."""
MIN_RUNS = 20
"""A class needs at least this many runs for a band of its own; otherwise it gets the band of a wider class."""
MIN_SOURCES = 3
"""A class needs runs from at least this many sources for a band of its own."""
SOURCE_WEIGHT = 0.35
"""If a source has n runs, each of them has the weight n^-0.35. With an exponent of 1 all sources would count equally, with 0 all runs.

A source with a thousand runs says less about the next source than ten sources with ten runs. But 80% of all runs must be in their band.
"""
LEAST_RUNS = 3
"""From this many runs of a software on, its own constants say something about its next run."""
Band = tuple[float, float]
"""Lower and upper end of a band, as logarithms of measured ÷ predicted."""
Known = Literal["measured", "related", "unknown"]
"""How well the constants of a software are known.

measured: they follow many runs of this software. related: they follow a few of its runs, or runs of a related software.
unknown: neither.
"""


@dataclass(frozen=True)
class RunClass:
    """The properties of a run that decide how well its step time is predicted."""

    several_hosts: bool
    moe: bool
    """Whether the model is an MoE model."""
    measured_generation: bool
    """Whether the constants of its device generation were fitted to many runs."""
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
        """Yield the name of the class, then the names of wider classes that contain it, up to "all"."""
        words = self._words()
        yield from (", ".join(words[:count]) for count in (4, 3))
        yield ", ".join((words[0], words[2]))
        yield words[2]
        yield "all"


def known(stack: str, parent: str, runs: Mapping[str, int], measured_with: Sequence[str]) -> Known:
    """Return how well the constants of `stack` are known.

    `parent` is a related software, whose constants it shares. `runs` has the number of fitted runs by software, `measured_with` the names
    of software with many runs.
    """
    if stack in measured_with:
        return "measured"
    few = stack != "default" and runs.get(stack, 0) >= LEAST_RUNS
    return "related" if few or parent not in ("", "default") else "unknown"


def band_of(run: RunClass, bands: Mapping[str, Sequence[float]]) -> Band:
    """Return the band of the narrowest class that contains the run and has a band."""
    low, high = next(bands[name] for name in run.names() if name in bands)
    return low, high


def fitted_bands(classes: Sequence[RunClass], sources: Sequence[str], residuals: np.ndarray) -> dict[str, list[float]]:
    """Return the bands of all classes with enough runs and sources.

    `classes`, `sources` and `residuals` have an entry for each run; a residual is ln(measured ÷ predicted), where the constants were fitted
    without the run's source. `SOURCE_WEIGHT` weighs the runs.
    """
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
    """Return the lower and upper end between which the share `COVERED` of the weight of all residuals lies.

    Half of the remaining weight is below the lower end, and half above the upper end.
    """
    order = np.argsort(residuals)
    middle = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    beyond = (1 - COVERED) / 2
    return [float(f"{end:.4f}") for end in np.interp([beyond, 1 - beyond], middle, residuals[order])]
