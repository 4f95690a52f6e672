"""When checkpoints are due, and how many a start writes: the plan of them agrees with a start played on an abstract clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.policies.checkpoint_times import auto_interval, due_after_step, due_by_clock, planned_checkpoints
from meshwright.spec.job import CheckpointSpec

STEPS = 100


@pytest.mark.parametrize(
    ("checkpoint", "done", "step_seconds", "count"),
    [
        ({"every": 0}, 0, None, 1),
        ({"every": 0, "at_end": False}, 0, None, 0),
        ({"every": 30}, 0, None, 4),
        ({"every": 30}, 60, None, 2),
        ({"every": 50}, 0, None, 2),  # the last of them is that of the last step
        ({"every": 50, "at_end": False}, 0, None, 2),
        ({}, 0, None, 1),
        ({}, 0, 5.9, 1),  # less than 10 minutes
        ({}, 0, 6.1, 2),
        ({}, 0, 24.1, 3),  # after 10 and 40 minutes and the last step
        ({}, 90, 24.1, 1),
    ],
)
def test_how_many_checkpoints_a_start_writes(
    checkpoint: dict[str, Any], done: int, step_seconds: float | None, count: int
) -> None:
    assert planned_checkpoints(CheckpointSpec(**checkpoint), STEPS, done, step_seconds) == count


def written(spec: CheckpointSpec, last_step: int, done: int, step_seconds: float) -> list[int]:
    """Steps after which a start writes a checkpoint whose steps take `step_seconds` each, and checkpoints no time."""
    now, since, steps = 0.0, 0.0, []
    for step in range(done + 1, last_step + 1):
        now += step_seconds
        if due_after_step(spec, step, last_step) or due_by_clock(spec, now - since, len(steps)):
            steps.append(step)
            since = now
    return steps


def test_by_the_clock_the_first_comes_after_ten_minutes_and_further_ones_every_thirty() -> None:
    auto = CheckpointSpec(at_end=False)
    assert written(auto, 20, 0, 300.0) == [2, 8, 14, 20]
    assert written(auto, 20, 17, 300.0) == [19]
    assert written(CheckpointSpec(), 20, 0, 29.0) == [20]


@given(
    st.builds(CheckpointSpec, every=st.one_of(st.integers(0, 30)), at_end=st.booleans()),
    st.integers(1, 200),
    st.integers(0, 50),
)
def test_as_many_as_planned_are_written_by_steps(spec: CheckpointSpec, last_step: int, done: int) -> None:
    done = min(done, last_step - 1)
    assert len(written(spec, last_step, done, 1.0)) == planned_checkpoints(spec, last_step, done, 1.0)


@given(st.integers(1, 400), st.integers(1, 600))
def test_by_the_clock_no_more_than_planned_are_written(last_step: int, step_seconds: int) -> None:
    """A checkpoint waits for the end of a step, so that a clock that runs exactly may see fewer."""
    spec = CheckpointSpec(at_end=False)
    found = len(written(spec, last_step, 0, float(step_seconds)))
    planned = planned_checkpoints(spec, last_step, 0, float(step_seconds))
    assert found <= planned and (found > 0) == (planned > 0)


@pytest.mark.parametrize(
    ("cost", "save", "hosts", "seconds"),
    [
        (0.1, 1.0, 2048, (2 * 0.1 * 6300 * 3600 / 2048) ** 0.5),  # 47 s, less than a minute
        (0.1, 1.0, 128, (2 * 0.1 * 6300 * 3600 / 128) ** 0.5),
        (5.0, 5.0, 1, 1800),
        (0.0, 1.0, 1, 60),
        (0.1, 400.0, 2048, 800),  # no checkpoint begins before the last has had its time twice
    ],
)
def test_the_interval_is_young_and_dalys_within_limits(cost: float, save: float, hosts: int, seconds: float) -> None:
    assert auto_interval(cost, save, hosts, 6300.0) == pytest.approx(max(60, seconds))


def test_a_measured_interval_replaces_the_thirty_minutes() -> None:
    auto = CheckpointSpec()
    assert not due_by_clock(auto, 599, 0, 60) and due_by_clock(auto, 600, 0, 60)
    assert not due_by_clock(auto, 59, 1, 60) and due_by_clock(auto, 60, 1, 60)
    assert not due_by_clock(CheckpointSpec(every=5), 1e9, 1, 60)
