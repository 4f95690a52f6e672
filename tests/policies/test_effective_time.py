"""Effective training time in closed form, against published formulas and figures."""

from __future__ import annotations

import math
from dataclasses import replace
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.policies.effective_time import (
    FailureClass,
    FailureModel,
    MeasuredFailure,
    effective_time,
    first_order,
    host_factor,
    losses,
    poisson_cdf,
    scale_measured,
    spares_needed,
)

HOUR = 3600.0
LLAMA3_MTTF = 2.78 * HOUR
"""466 interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, table 5)."""
PROJECTED_MTTF = 0.23 * HOUR
"""Projected for 131,072 GPUs (arXiv 2410.21680)."""


def one_class(
    mttf: float, hosts: int = 1536, detect: float = 10.0, restart: float = 30.0, interval: float = 60.0
) -> FailureModel:
    """Failures of one class without lost hosts; a checkpoint of 0.1 s."""
    return FailureModel(hosts, mttf, interval, 0.1, (FailureClass("crash", 1.0, detect, restart, 0.0),))


@pytest.mark.parametrize(
    ("gpus", "mttf", "expected"),
    [(12_288, LLAMA3_MTTF, 0.9913), (131_072, PROJECTED_MTTF, 0.9138)],
)
def test_it_agrees_with_the_budget_formula_of_large_jobs(gpus: int, mttf: float, expected: float) -> None:
    """1 − δ/T − (detection + restart + T/2)/MTTF: 10 s, 30 s and 60 s between checkpoints of 0.1 s; within 0.5 points."""
    model = one_class(mttf, gpus // 8)
    formula = 1 - 0.1 / 60 - (10 + 30 + 60 / 2) / mttf
    assert formula == pytest.approx(expected, abs=5e-5)
    assert first_order(model) == pytest.approx(formula)
    assert effective_time(model) == pytest.approx(formula, abs=0.005)


def test_it_agrees_with_daly_s_expected_run_time() -> None:
    """Daly 2006, equation for the total wall-clock time: M e^(R/M) (e^((T+δ)/M) − 1) · work/T."""
    model, mttf = one_class(500.0), 500.0
    wall_clock = mttf * math.exp(40 / mttf) * math.expm1(60.1 / mttf) / 60
    assert effective_time(model) == pytest.approx(1 / wall_clock)


def test_it_predicts_byterobust_s_97_percent() -> None:
    """9,600 GPUs on 1,200 hosts (arXiv 2509.16293); within 2 points of the published 97%.

    From the paper: 93 s to resolve a CUDA error, its most frequent failure; a hang is declared after 10 minutes without
    RDMA traffic, 9.9% of failures (table 1); 4,289 s for NaN, 0.3%; 65 s for an in-place restart; checkpoints at every
    step that leave 99.1% of the speed. Assumed: steps of 10 s, and Llama 3's failures per host.
    """
    classes = (
        FailureClass("explicit", 0.898, 93, 65, 0),
        FailureClass("hang", 0.099, 600, 65, 0),
        FailureClass("nan", 0.003, 4289, 65, 0),
    )
    model = FailureModel(1200, LLAMA3_MTTF * 2048 / 1200, 10.0, 0.09, classes)
    assert effective_time(model) == pytest.approx(0.97, abs=0.02)


def test_losses_sum_to_first_order() -> None:
    model = replace(
        one_class(LLAMA3_MTTF),
        classes=(
            FailureClass("process", 0.4, 1, 30, 2, 1),
            FailureClass("host", 0.6, 10, 30, 20, 30, loses_host=True),
        ),
        replace_seconds=600.0,
    )
    parts = losses(model)
    assert sum(parts.values()) == pytest.approx(1 - first_order(model))
    assert parts["detection"] == pytest.approx((0.4 * 1 + 0.6 * 10) / LLAMA3_MTTF)
    assert parts["lost steps"] == pytest.approx((0.4 * 1 + 0.6 * 30 + 30) / LLAMA3_MTTF)
    assert parts["missing hosts"] == pytest.approx(1 - poisson_cdf(0, 0.6 * 600 / LLAMA3_MTTF))


@given(st.floats(600, 1e6), st.floats(1, 600), st.floats(0, 300), st.floats(0, 300))
def test_it_is_a_share_and_never_below_first_order(mttf: float, interval: float, detect: float, restart: float) -> None:
    model = one_class(mttf, 100, detect, restart, interval)
    assert 0 < effective_time(model) < 1
    assert effective_time(model) >= first_order(model) - 0.1 / interval * (0.1 / interval + interval / mttf) - 1e-9


@given(st.integers(0, 8), st.floats(1, 3000), st.floats(0, 600))
def test_a_spare_never_costs_time_and_many_are_enough(spares: int, replace_seconds: float, wait: float) -> None:
    model = FailureModel(
        1000,
        2000.0,
        60.0,
        0.1,
        (FailureClass("host", 1.0, 10, 30, 5, loses_host=True),),
        spares,
        replace_seconds,
        wait,
        40.0,
    )
    assert host_factor(replace(model, spares=spares + 1)) >= host_factor(model) - 1e-12
    assert isclose(host_factor(replace(model, spares=40)), 1.0, abs_tol=1e-6)


def test_spares_needed_is_the_quantile_of_hosts_in_replacement() -> None:
    """ByteRobust's rule: the 99th percentile of the hosts lost in one replacement time (arXiv 2509.16293, section 8)."""
    model = FailureModel(
        1000, HOUR, 60.0, 0.1, (FailureClass("host", 1.0, 10, 30, 5, loses_host=True),), replace_seconds=2 * HOUR
    )
    spares = spares_needed(model)
    probabilities = [math.exp(-2) * 2**count / math.factorial(count) for count in range(spares + 1)]
    assert sum(probabilities) >= 0.99 > sum(probabilities[:-1])


def test_measured_times_scale_to_another_failure_rate() -> None:
    failures = [
        MeasuredFailure("crash", 0.2, 5.0, 1.0),
        MeasuredFailure("crash", 0.4, 7.0, 3.0),
        MeasuredFailure("hang", 6.0, 6.0, 2.0),
    ]
    shares = {"crash": 0.85, "hang": 0.15}
    mean = 0.85 * (0.3 + 6.0 + 2.0) + 0.15 * (6.0 + 6.0 + 2.0)
    half_hour = scale_measured(failures, shares, 1800.0, 0.002)
    assert half_hour.seconds_per_failure == pytest.approx(mean)
    assert half_hour.effective == pytest.approx(1 - 0.002 - mean / 1800)
    assert scale_measured(failures, shares, 3 * HOUR, 0.002).effective == pytest.approx(1 - 0.002 - mean / (3 * HOUR))
    assert half_hour.formula == (
        "1 − 0.0020 − (0.85 × (0.30 + 6.00 + 2.00) s [crash] + 0.15 × (6.00 + 6.00 + 2.00) s [hang]) / 1,800 s = 0.9929"
    )
    assert scale_measured(failures, shares, 1.0, 0.0).effective == 0.0


def test_scaling_refuses_a_class_that_was_not_measured_and_shares_that_are_no_whole() -> None:
    crash = [MeasuredFailure("crash", 0.2, 5.0, 1.0)]
    with pytest.raises(ValueError, match=r"no failure of class hang was measured; measured: \['crash'\]"):
        scale_measured(crash, {"crash": 0.85, "hang": 0.15}, 1800.0, 0.0)
    with pytest.raises(ValueError, match="must sum to 1"):
        scale_measured(crash, {"crash": 0.85}, 1800.0, 0.0)
