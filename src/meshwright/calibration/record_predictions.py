"""Predicts the records of a table of runs: seconds with an 80% band, memory, whether the run fits, and the defaults
that were assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.calibration.published_records import PublishedCase, RecordReading, read_record
from meshwright.costs.bands import RunClass, band_of
from meshwright.costs.constants import at_release, constant_arrays, known_software, table
from meshwright.costs.device_rates import Machine
from meshwright.costs.stack_footprint import FITTING_SHARE, footprint, memory_constants
from meshwright.costs.step import StepCost, step_cost
from meshwright.workload.arrays import side_by_side
from meshwright.workload.layouts import FULL, Layouts
from meshwright.workload.model_shape import Shape


@dataclass(frozen=True)
class Prediction:
    """The prediction for a record. If it cannot be predicted, `reason` says why and the values are None."""

    seconds: float | None
    """Seconds of a step."""
    low: float | None
    """Lower end of the 80% band of `seconds`."""
    high: float | None
    """Upper end of the band."""
    memory_gib: float | None
    """Memory of the rank whose memory the run's software prints."""
    fullest_rank_memory: dict[str, float] | None
    """The same memory in GiB, by category."""
    exposed: dict[str, float] | None
    """Seconds of exposed communication by axis."""
    fits: bool | None
    """Whether the fullest rank fits into the device's memory."""
    assumed: tuple[str, ...]
    """The assumed defaults, one sentence each."""
    reason: str | None
    run_class: str | None = None
    """Name of the class of runs whose band is used (`costs.bands`)."""


def predict_records(
    records: Sequence[Mapping[str, str]], constants_given: dict[str, Any] | None = None
) -> list[Prediction]:
    """Return a prediction for each record, in the same order.

    `constants_given` replaces the content of constants.yaml.
    """
    readings = [read_record(record) for record in records]
    cases = [reading.case for reading in readings if reading.case is not None]
    figures = iter(_price(cases, constants_given) if cases else [])
    return [_prediction(reading, next(figures) if reading.case is not None else None) for reading in readings]


def price(cases: Sequence[PublishedCase], constants_given: dict[str, Any] | None = None) -> StepCost:
    """Return the costs of a step of all cases; each field is an array of shape (cases,)."""
    shape: Shape = side_by_side([case.shape for case in cases])
    machine: Machine = side_by_side([case.machine for case in cases])
    layout: Layouts = side_by_side([case.layout for case in cases])
    release = np.array([case.release for case in cases])
    constants = at_release(constant_arrays([(case.generation, case.stack) for case in cases], constants_given), release)
    memory_share = sum(memory(cases, constants_given, as_printed=False).values()) / machine.memory
    return step_cost(shape, machine, layout, constants, memory_share)


def memory(
    cases: Sequence[PublishedCase], constants_given: dict[str, Any] | None = None, *, as_printed: bool
) -> dict[str, np.ndarray]:
    """Return the bytes of all cases by category, in arrays of shape (cases,).

    They are the bytes of the fullest pipeline stage, or with `as_printed` of the stage whose memory the case's software
    prints.
    """
    shape: Shape = side_by_side([case.shape for case in cases])
    layout: Layouts = side_by_side([case.layout for case in cases])
    first = np.array([float(as_printed and case.first_stage) for case in cases])
    return footprint(
        shape,
        layout,
        memory_constants([case.stack for case in cases], constants_given and constants_given["memory"]),
        first,
    )


def class_of(case: PublishedCase, values: Mapping[str, Any] | None = None) -> RunClass:
    """Return the class of runs to which a case belongs, under the table of constants `values`."""
    values = values or table()
    return RunClass(
        several_hosts=bool(case.layout.ranks > case.machine.per_node),
        moe=bool(case.shape.moe_layers > 0),
        measured_generation=case.generation in values["measured_with"],
        software=known_software(case.stack, values),
    )


def _price(cases: Sequence[PublishedCase], constants_given: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the predicted values of each case, by the field of `Prediction`."""
    cost = price(cases, constants_given)
    by_category = memory(cases, constants_given, as_printed=True)
    least_bytes = _least_memory(cases, constants_given)
    values = constants_given or table()
    predictions = []
    for index, case in enumerate(cases):
        run_class = class_of(case, values)
        low, high = band_of(run_class, values["bands"])
        seconds = float(cost.seconds[index])
        bytes_of = {category: float(size[index]) for category, size in by_category.items()}
        predictions.append(
            {
                "seconds": seconds,
                "low": seconds * float(np.exp(low)),
                "high": seconds * float(np.exp(high)),
                "run_class": run_class.name,
                "memory_gib": sum(bytes_of.values()) / 2**30,
                "fullest_rank_memory": {category: size / 2**30 for category, size in bytes_of.items()},
                "exposed": {axis: float(seconds_by_case[index]) for axis, seconds_by_case in cost.exposed.items()},
                "fits": bool(least_bytes[index] <= FITTING_SHARE * case.machine.memory),
            }
        )
    return predictions


def _least_memory(cases: Sequence[PublishedCase], constants_given: dict[str, Any] | None) -> np.ndarray:
    """Return the bytes of each case's fullest stage.

    If a record does not state recomputation, full recomputation counts if it needs less.
    """
    recomputed = [
        replace(case, layout=replace(case.layout, recompute=FULL)) if case.may_recompute else case for case in cases
    ]
    as_stated, if_recomputed = (
        sum(memory(cases_priced, constants_given, as_printed=False).values()) for cases_priced in (cases, recomputed)
    )
    return np.minimum(as_stated, if_recomputed)


def _prediction(reading: RecordReading, figures: dict[str, Any] | None) -> Prediction:
    """Return the prediction for a reading; `figures` are its predicted values, None if it cannot be predicted."""
    if figures is None:
        return Prediction(None, None, None, None, None, None, None, reading.assumed, reading.reason)
    return Prediction(**figures, assumed=reading.assumed, reason=reading.reason)
