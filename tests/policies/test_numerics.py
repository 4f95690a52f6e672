from __future__ import annotations

import math

import pytest

from meshwright.policies.numerics import (
    FEWEST_STEPS,
    WINDOW_STEPS,
    GoodStep,
    SpikeLimits,
    judge,
    spike_limits,
)


def history(steps: int) -> list[GoodStep]:
    return [GoodStep(step, 2.0, 0.5) for step in range(1, steps + 1)]


def test_limits_are_a_factor_of_the_median_of_earlier_steps() -> None:
    assert spike_limits(history(FEWEST_STEPS - 1), 1000, 3.0) == SpikeLimits()
    assert spike_limits(history(FEWEST_STEPS), FEWEST_STEPS + 1, 3.0) == SpikeLimits(), "the last step is not read yet"
    assert spike_limits(history(FEWEST_STEPS), FEWEST_STEPS + 2, 3.0) == SpikeLimits(6.0, 1.5)
    longer = [GoodStep(0, 1e9, 1e9)] * 100 + history(WINDOW_STEPS)
    assert spike_limits(longer, 1000, 3.0) == SpikeLimits(6.0, 1.5), "old steps do not count"


def test_limits_of_a_step_do_not_depend_on_when_they_are_computed() -> None:
    values = [GoodStep(step, float(step), step / 10) for step in range(1, 60)]
    assert spike_limits(values[:38], 40, 3.0) == spike_limits(values, 40, 3.0)


@pytest.mark.parametrize(
    ("loss", "norm", "verdict"),
    [
        (1.0, 1.0, "good"),
        (math.nan, 1.0, "nonfinite"),
        (1.0, math.inf, "nonfinite"),
        (math.nan, math.nan, "nonfinite"),
        (11.0, 1.0, "spike"),
        (1.0, 21.0, "spike"),
        (10.0, 20.0, "good"),
        (-math.inf, 1.0, "nonfinite"),
    ],
)
def test_verdicts(loss: float, norm: float, verdict: str) -> None:
    assert judge(loss, norm, SpikeLimits(10.0, 20.0)) == verdict
