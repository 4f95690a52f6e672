"""Corrects a machine's profile by a finished run: a factor on device time makes the prediction equal the measurement.

The other parts of the prediction (schedule, links, host) stay, so a run whose step depends on those alone is rejected.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from meshwright.config.profile_file import to_json
from meshwright.durable.writes import write_durable
from meshwright.simulator.step_simulation import simulate_plan
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import Plan
from meshwright.spec.profile import Correction, MachineProfile
from meshwright.spec.run import RunSpec

SMALLEST_FACTOR = 0.1
"""Smallest factor that is considered."""
LARGEST_FACTOR = 10.0
"""Largest factor that is considered."""
HALVINGS = 20
"""Steps of the bisection: they reduce the range of the logarithm, 4.6, to 4e-6."""


def with_correction(profile: MachineProfile, run: RunSpec, plan: Plan, measured_seconds: float) -> MachineProfile:
    """`profile` with a correction from `run`, which replaces an earlier correction from a run of this name.

    Raises BadInput when the profile is of another device, the plan cannot be priced, or no factor on device time explains the step.
    """
    if profile.gpu != run.cluster.gpu:
        raise BadInput(f"the profile is of {profile.gpu} and the run was on {run.cluster.gpu}; give each its own file")
    uncorrected = replace(profile, corrections=())
    correction = Correction(
        run=run.name,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        predicted_seconds=predicted_seconds(uncorrected, run, plan, 1.0),
        measured_seconds=measured_seconds,
        factor=_factor(uncorrected, run, plan, measured_seconds),
    )
    other_corrections = tuple(correction for correction in profile.corrections if correction.run != run.name)
    return replace(profile, corrections=(*other_corrections, correction))


def predicted_seconds(profile: MachineProfile, run: RunSpec, plan: Plan, factor: float) -> float:
    """Simulated seconds of the run's step with device time multiplied by `factor`.

    The simulator reads profiles from files, so a temporary file is written.
    """
    correction = Correction(run=run.name, date=profile.date, predicted_seconds=1.0, measured_seconds=1.0, factor=factor)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        write_durable(file, to_json(replace(profile, corrections=(correction,))))
        cluster = replace(run.cluster, profile=str(file))
        return simulate_plan(run.model, run.train, plan, cluster).step_seconds


def _factor(profile: MachineProfile, run: RunSpec, plan: Plan, measured_seconds: float) -> float:
    """The factor, by bisection of its logarithm; the step time increases with it."""
    low = math.log(SMALLEST_FACTOR)
    high = math.log(LARGEST_FACTOR)
    range_ends = [predicted_seconds(profile, run, plan, math.exp(bound)) for bound in (low, high)]
    if not range_ends[0] <= measured_seconds <= range_ends[1]:
        raise BadInput(
            f"run {run.name}: its steps took {measured_seconds:.4g} s, and device time {SMALLEST_FACTOR:g} to {LARGEST_FACTOR:g} "
            f"times the profile's explains {range_ends[0]:.4g} to {range_ends[1]:.4g} s; "
            "measure this machine anew with `meshwright profile --out FILE`, or "
            "look at a timeline"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if predicted_seconds(profile, run, plan, math.exp(middle)) < measured_seconds:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)
