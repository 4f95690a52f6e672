"""The slowest of many ranks and its effect on a synchronous job."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from stragglers import expected_slowest

from meshwright.calibration.model_dimensions import dimensions_by_name, shape_from_dimensions
from meshwright.costs.constants import constants
from meshwright.costs.machine_rates import machine_of
from meshwright.costs.step import step_cost
from meshwright.spec.cluster import ClusterSpec
from meshwright.workload.layouts import Layouts

MODEL = shape_from_dimensions(dimensions_by_name("GPT-175B"))
MACHINE = machine_of(ClusterSpec(gpu="A100", nodes=32, gpus_per_node=8))
K = replace(constants("ampere", "megatron_lm"), jitter=0.0)
PLAN = Layouts(
    tensor=8.0,
    pipeline=8.0,
    virtual=1.0,
    context=1.0,
    expert=1.0,
    data=4.0,
    zero=0.0,
    shards=4.0,
    micro_batch=1.0,
    global_batch=256.0,
    seq=2048.0,
    recompute=0.0,
)


@pytest.mark.parametrize(("ranks", "tolerance"), [(2, 0.05), (5, 0.015), (10, 0.01), (100, 0.01), (10000, 0.01)])
def test_expected_largest_of_normal_values(ranks: int, tolerance: float) -> None:
    """Compared with the integral of 1 − Φ^n above zero minus that of Φ^n below."""
    values = np.linspace(-9, 9, 36001)
    below = np.array([NormalDist().cdf(x) for x in values]) ** ranks
    exact = float(np.sum(np.where(values > 0, 1 - below, -below)) * (values[1] - values[0]))
    assert float(expected_slowest(ranks, 1.0)) - 1 == pytest.approx(exact, rel=tolerance)
    assert float(expected_slowest(ranks, 0.03)) - 1 == pytest.approx(0.03 * exact, rel=tolerance)


def test_one_rank_waits_for_nobody() -> None:
    assert expected_slowest(np.array([1.0, 1.0]), 0.1).tolist() == [1.0, 1.0]


def test_a_slow_rank_holds_its_stage_and_no_other() -> None:
    """m micro-batches of the slowest stage are longer by the factor; the fill runs through the others."""
    even, slow = (step_cost(MODEL, MACHINE, plan, K) for plan in (PLAN, replace(PLAN, slowest_rank_ratio=1.2)))
    waited = float(slow.exposed["slowest rank"])
    assert float(slow.seconds - even.seconds) == pytest.approx(waited)
    assert float(slow.bubble) == pytest.approx(float(even.bubble))
    stage = (
        float(even.compute + even.exposed["tensor"])
        + float(even.host)
        - float(PLAN.micro_batches) * K.host_micro_us * 1e-6
    )
    assert waited == pytest.approx(0.2 * stage, rel=1e-9)
    assert float(even.exposed["slowest rank"]) == 0
