"""Describes a sweep: several runs of one run file that differ in some keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.spec.fields import Positive

Metric = Literal["validation_loss", "loss"]
"""The value by which runs are compared."""


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """The median rule: a run ends at a step if its loss there is above the median loss of the other runs at that step."""

    steps: tuple[Positive, ...]
    """Steps at which runs are compared, by the mean training loss of the ten steps up to it."""
    runs: Positive = 3
    """Number of other runs that must have reached the step before a run can end there."""


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """A sweep file. The runs are all combinations of the values in `grid`, for each entry of `list`."""

    name: str
    """Folder of the sweep under `runs/`, with a folder for each run; left out, the name of the file without its
    extension.
    """
    run: str
    """Run file that all runs share, relative to this file."""
    set: dict[str, Any] = field(default_factory=dict)
    """Keys of the run file with the values that all runs have instead, e.g. `train.steps: 200`."""
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of the run file with a list of values each. Every combination of values is a run."""
    list: tuple[dict[str, Any], ...] = ()
    """Runs by their keys and values, for combinations that form no grid."""
    parallel: Positive | Literal["auto"] = 1
    """Number of runs at the same time, each on devices of this host that no other run uses. auto: as many as there are
    devices for. A CPU rank uses one core.
    """
    metric: Metric = "validation_loss"
    """The value by which runs are ranked, the lowest first. The training loss is the mean of the last ten steps."""
    stop_early: EarlyStop | None = None
    """When runs with a worse loss end early; none: all runs continue to their end."""
