"""Rows of a table of runs → predicted seconds with an 80% band, predicted memory, whether it fits, and what was assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.calibration.published_rows import Case, Reading, read_row
from meshwright.costs.constants import aged, per_row, table
from meshwright.costs.machine import Machine
from meshwright.costs.stack_footprint import footprint, keeping
from meshwright.costs.step import StepCost, step_cost
from meshwright.workload.arrays import side_by_side
from meshwright.workload.layouts import FULL, Layouts
from meshwright.workload.model_shape import Shape

FITS = 0.89
"""Share of a device's memory that a layout may need and still be said to fit; the rest is left to what is not accounted."""


@dataclass(frozen=True)
class Prediction:
    """What is said of one row; figures are None when the row cannot be expressed, and `reason` says why."""

    seconds: float | None
    low: float | None
    high: float | None
    memory_gib: float | None
    memory_by_kind: dict[str, float] | None
    exposed: dict[str, float] | None
    fits: bool | None
    assumed: tuple[str, ...]
    reason: str | None


def predict_rows(rows: Sequence[Mapping[str, str]], given: dict[str, Any] | None = None) -> list[Prediction]:
    """A prediction for every row, in order. `given` replaces constants.yaml."""
    readings = [read_row(row) for row in rows]
    cases = [reading.case for reading in readings if reading.case is not None]
    priced = iter(_price(cases, given) if cases else [])
    return [_prediction(reading, next(priced) if reading.case is not None else None) for reading in readings]


def price(cases: Sequence[Case], given: dict[str, Any] | None = None) -> StepCost:
    """Step costs of many cases, side by side."""
    shape: Shape = side_by_side([case.shape for case in cases])
    machine: Machine = side_by_side([case.machine for case in cases])
    layout: Layouts = side_by_side([case.layout for case in cases])
    release = np.array([case.release for case in cases])
    constants = aged(per_row([(case.generation, case.stack) for case in cases], given), release)
    filled = sum(memory(cases, given, as_printed=False).values()) / machine.memory
    return step_cost(shape, machine, layout, constants, filled)


def memory(cases: Sequence[Case], given: dict[str, Any] | None = None, *, as_printed: bool) -> dict[str, np.ndarray]:
    """Bytes by kind of many cases: of the fullest stage, or of the one whose figure each case's software prints."""
    shape: Shape = side_by_side([case.shape for case in cases])
    layout: Layouts = side_by_side([case.layout for case in cases])
    first = np.array([float(as_printed and case.first_stage) for case in cases])
    return footprint(shape, layout, keeping([case.stack for case in cases], given and given["memory"]), first)


def half_width(case: Case, bands: Mapping[str, float]) -> float:
    """Half the 80% band of `case` in logarithms: its stack's, or `default` for one that too few sources know."""
    return bands.get(case.stack, bands["default"])


def _price(cases: Sequence[Case], given: dict[str, Any] | None) -> list[dict[str, Any]]:
    cost, kinds = price(cases, given), memory(cases, given, as_printed=True)
    least = _least_memory(cases, given)
    bands = (given or table())["bands"]
    found = []
    for at, case in enumerate(cases):
        doubt = float(np.exp(half_width(case, bands)))
        seconds = float(cost.seconds[at])
        bytes_of = {kind: float(size[at]) for kind, size in kinds.items()}
        found.append(
            {
                "seconds": seconds,
                "low": seconds / doubt,
                "high": seconds * doubt,
                "memory_gib": sum(bytes_of.values()) / 2**30,
                "memory_by_kind": {kind: size / 2**30 for kind, size in bytes_of.items()},
                "exposed": {axis: float(share[at]) for axis, share in cost.exposed.items()},
                "fits": bool(least[at] <= FITS * case.machine.memory),
            }
        )
    return found


def _least_memory(cases: Sequence[Case], given: dict[str, Any] | None) -> np.ndarray:
    """Bytes of each case's fullest stage; with all activations recomputed where its row leaves that open, for then it may have been."""
    saving = [
        replace(case, layout=replace(case.layout, recompute=FULL)) if case.may_recompute else case for case in cases
    ]
    plain, least = (sum(memory(some, given, as_printed=False).values()) for some in (cases, saving))
    return np.minimum(plain, least)


def _prediction(reading: Reading, priced: dict[str, Any] | None) -> Prediction:
    if priced is None:
        return Prediction(None, None, None, None, None, None, None, reading.assumed, reading.reason)
    return Prediction(**priced, assumed=reading.assumed, reason=reading.reason)
