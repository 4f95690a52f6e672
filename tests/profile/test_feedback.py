"""The step time of a finished run gives the factor on device time that predicts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.config.presets import MODEL_PRESETS
from meshwright.profile.feedback import predicted_seconds, with_correction
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import from_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.plan import BatchPlan, MeshAxis, Plan
from meshwright.spec.profile import Correction
from meshwright.spec.run import ModelSection, RunSpec
from tests.profile.made import made_profile

RUN = RunSpec(
    name="mine",
    model=from_plain(ModelSection, MODEL_PRESETS["llama3-8b"]),
    train=TrainSpec(steps=9, global_batch=16, seq_len=4096),
    cluster=ClusterSpec(gpu="H200", gpus_per_node=8),
)
PLAN = Plan(mesh=(MeshAxis(axis="shard", size=8),), batch=BatchPlan(global_batch=16, micro_batch=2, accumulate=1))
OTHER = Correction(run="other", date="2026", predicted_seconds=1.0, measured_seconds=2.0, factor=2.0)


def test_the_factor_that_made_a_step_is_found_whatever_was_corrected_before() -> None:
    profile = made_profile()
    measured = predicted_seconds(profile, RUN, PLAN, 1.27)
    after = with_correction(replace(profile, corrections=(OTHER,)), RUN, PLAN, measured)
    assert after.corrections[0] == OTHER and replace(after, corrections=()) == profile
    correction = after.corrections[1]
    assert correction.factor == pytest.approx(1.27, rel=1e-4)
    assert correction.measured_seconds == measured and correction.predicted_seconds < measured
    assert predicted_seconds(profile, RUN, PLAN, correction.factor) == pytest.approx(measured, rel=1e-4)


def test_a_run_fed_back_twice_counts_once() -> None:
    twice = made_profile()
    for factor in (1.1, 1.2):
        twice = with_correction(twice, RUN, PLAN, predicted_seconds(made_profile(), RUN, PLAN, factor))
    assert [round(correction_entry.factor, 3) for correction_entry in twice.corrections] == [1.2]


def test_what_device_time_cannot_explain_is_refused() -> None:
    with pytest.raises(BadInput, match="run mine: its steps took 3600 s, and device time 0.1 to 10 times"):
        with_correction(made_profile(), RUN, PLAN, 3600.0)
    with pytest.raises(BadInput, match="the profile is of H200 and the run was on H100"):
        with_correction(made_profile(), replace(RUN, cluster=ClusterSpec(gpu="H100", gpus_per_node=8)), PLAN, 1.0)
