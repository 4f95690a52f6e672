"""Compute times of ranks and steps, and their aggregation, against sums by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.diagnosis.compute_times import KEPT_STEPS, ComputeTimes
from meshwright.diagnosis.heat_map import heat_map
from meshwright.events.span import SpanRecord
from meshwright.events.span_ring import SpanRing, ring_path

MS = 10**6


def step(number: int, forward: int, *, sampled: int = 1) -> list[SpanRecord]:
    """A step of 100 ms: a wait of 5 ms before forward, waits of 2 and 3 ms inside, and backward of 20 ms."""
    begin = 100 * MS * number
    return [
        SpanRecord(begin, 5 * MS, step=number, stage=0, phase="collective_wait"),
        SpanRecord(begin + 6 * MS, 2 * MS, step=number, stage=0, count=sampled, phase="collective_wait"),
        SpanRecord(begin + 9 * MS, 3 * MS, step=number, stage=0, phase="collective_wait"),
        SpanRecord(begin + 5 * MS, forward * MS, step=number, stage=0, phase="forward"),
        SpanRecord(begin + 50 * MS, 20 * MS, step=number, stage=0, phase="backward"),
        SpanRecord(begin + 80 * MS, 10 * MS, step=number, phase="collective_wait"),
        SpanRecord(begin, 100 * MS, step=number, phase="step"),
    ]


def ring(run: Path, rank: int, attempt: int = 1, ranks: int = 2) -> SpanRing:
    path = ring_path(run, 1, attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    return SpanRing(path, {"rank": rank, "ranks": ranks}, 10_000)


def test_waits_inside_compute_are_taken_out(tmp_path: Path) -> None:
    for rank, forward in enumerate((30, 45)):
        spans = ring(tmp_path, rank)
        for number in range(1, 6):
            spans.append(step(number, forward, sampled=4 if number == 5 else 1))
    times = ComputeTimes(tmp_path)
    times.update(1 << 20)
    steps, seconds = times.known
    assert steps.tolist() == [1, 2, 3, 4, 5]
    expected = np.array([[0.045] * 4 + [0.039], [0.060] * 4 + [0.054]])  # a wait that stands for four takes 6 ms more
    np.testing.assert_allclose(seconds, expected, rtol=1e-6)
    assert times.last_step.tolist() == [5, 5] and times.complete


def test_a_step_without_compute_counts_as_a_whole_and_a_checkpoint_not(tmp_path: Path) -> None:
    spans = ring(tmp_path, 0, ranks=1)
    spans.append([SpanRecord(0, 7 * MS, step=1, phase="step")])
    spans.append([SpanRecord(8 * MS, 50 * MS, step=1, stage=0, phase="forward")])  # a validation after step 1
    spans.append([SpanRecord(60 * MS, 9 * MS, step=2, phase="step")])
    times = ComputeTimes(tmp_path)
    times.update(1 << 20)
    np.testing.assert_allclose(times.known[1], [[0.007, 0.009]], rtol=1e-6)


def test_a_rollback_replaces_steps_and_a_new_start_begins_anew(tmp_path: Path) -> None:
    first = ring(tmp_path, 0, ranks=1)
    for number in range(1, KEPT_STEPS + 3):
        first.append(step(number, 30))
    times = ComputeTimes(tmp_path)
    times.update(10 << 20)
    assert times.known[0].tolist() == list(range(3, KEPT_STEPS + 3)), "the newest steps are kept"
    first.append(step(900, 60))
    times.update(10 << 20)
    steps, seconds = times.known
    assert steps[-1] == 900 and seconds[0, -2:].tolist() == pytest.approx([0.045, 0.075])
    ring(tmp_path, 0, attempt=2, ranks=1).append(step(5, 20))
    times.update(10 << 20)
    assert times.known[0].tolist() == [5]


def test_a_map_keeps_the_slowest_rank_of_a_row_and_the_mean_of_a_column() -> None:
    steps, seconds = np.arange(10, 30), np.ones((8, 20))
    seconds[5] = 2.0  # always slow
    seconds[2, 0] = 3.0  # once
    seconds[7, 10:] = np.nan
    whole = heat_map(steps, seconds, 8, 20)
    assert whole.ratio.shape == (8, 20) and whole.ratio[2, :2].tolist() == [3.0, 1.0]
    assert np.isnan(whole.ratio[7, 10:]).all() and whole.ranks[7] == (7, 7) and whole.steps[0] == (10, 10)
    small = heat_map(steps, seconds, 2, 4)
    assert small.ranks == ((0, 3), (4, 7)) and small.steps == ((10, 14), (15, 19), (20, 24), (25, 29))
    assert small.ratio.tolist() == [[1.4, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]


def test_groups_begin_at_multiples_of_their_size() -> None:
    found = heat_map(np.arange(7, 30), np.ones((1, 23)), 5, 6)
    assert found.steps == ((8, 11), (12, 15), (16, 19), (20, 23), (24, 27), (28, 29))
    assert [heat_map(np.arange(3), np.ones((64, 3)), rows, 9).ranks[0] for rows in (64, 22, 16, 5)] == [
        (0, 0),
        (0, 2),
        (0, 3),
        (0, 15),
    ]
    assert heat_map(np.zeros(0, int), np.zeros((3, 0)), 5, 5).steps == ()
