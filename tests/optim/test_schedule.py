from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.optim.schedule import learning_rate
from meshwright.spec.job import TrainSpec


def job(**other) -> TrainSpec:
    return TrainSpec(**{"steps": 100, "global_batch": 1, "learning_rate": 2.0, "warmup_steps": 10, **other})


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert [learning_rate(job(), step) for step in (1, 5, 10)] == pytest.approx([0.2, 1.0, 2.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_every_schedule_ends_at_the_floor(schedule: str) -> None:
    assert learning_rate(job(schedule=schedule, min_learning_rate=0.25), 100) == pytest.approx(0.5)


def test_shapes_in_the_middle() -> None:
    halfway = 55
    assert learning_rate(job(min_learning_rate=0.0), halfway) == pytest.approx(2 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert learning_rate(job(schedule="linear", min_learning_rate=0.0), halfway) == pytest.approx(1.0)
    assert learning_rate(job(schedule="wsd"), 80) == pytest.approx(2.0)
    assert learning_rate(job(schedule="wsd", min_learning_rate=0.0), 90) == pytest.approx(1.0)


def test_the_inverse_square_root_passes_the_peak_and_stays_above_the_floor() -> None:
    spec = job(schedule="inverse_sqrt", min_learning_rate=0.4)
    assert [learning_rate(spec, step) for step in (10, 40, 90)] == pytest.approx([2.0, 1.0, 0.8])
    assert learning_rate(job(schedule="inverse_sqrt", warmup_steps=0, min_learning_rate=0.0), 16) == pytest.approx(0.5)


@given(
    steps=st.integers(1, 500),
    warmup=st.integers(0, 499),
    floor=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "linear", "wsd", "inverse_sqrt"]),
)
def test_stays_between_zero_and_peak_and_never_rises_after_warm_up(
    steps: int, warmup: int, floor: float, schedule: str
) -> None:
    spec = job(steps=steps, warmup_steps=min(warmup, steps - 1), min_learning_rate=floor, schedule=schedule)
    rates = [learning_rate(spec, step) for step in range(1, steps + 1)]
    assert all(0 <= rate <= 2.0 + 1e-12 for rate in rates)
    after = rates[max(spec.warmup_steps - 1, 0) :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
