"""The description of a sweep: several runs of one run file that differ in some keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.spec.fields import Positive

Metric = Literal["validation_loss", "loss"]


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """The median rule: a run whose loss at a step is above the median of the others' at that step ends there."""

    steps: tuple[Positive, ...]
    """Steps at which a run is compared, by the mean training loss of the ten steps up to it."""
    runs: Positive = 3
    """Other runs that must have reached the step before one is stopped by it."""


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """A sweep file. The runs are all combinations of the values in `grid`, for each entry of `list`."""

    name: str
    """Folder of the sweep under `runs/`, with a folder for each run; the file's stem when left out."""
    run: str
    """Run file that all runs share, relative to this file."""
    set: dict[str, Any] = field(default_factory=dict)
    """Keys of the run file with the values that all runs have instead, e.g. `train.steps: 200`."""
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of the run file with a list of values each; every combination is a run."""
    list: tuple[dict[str, Any], ...] = ()
    """Runs by their keys and values, for combinations that are no grid."""
    parallel: Positive | Literal["auto"] = 1
    """Runs at the same time, on devices of this host that no other one uses; auto: as many as have devices. A CPU rank takes a core."""
    metric: Metric = "validation_loss"
    """Figure by which runs are ranked, the lowest first; the training loss is the mean of the last ten steps."""
    stop_early: EarlyStop | None = None
    """When to end runs that fall behind; none ends none."""
