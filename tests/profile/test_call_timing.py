"""The number of repeats of a timed call, and the median of its times."""

from __future__ import annotations

import pytest
import torch

from meshwright.profile import call_timing as call_timing
from meshwright.profile.call_timing import (
    LARGEST_BATCH,
    MAX_BATCHES,
    MIN_BATCH_SECONDS,
    MIN_BATCHES,
    TeamClock,
    _batches_within_budget,
)
from meshwright.profile.team import Team

ALONE = Team(torch.device("cpu"))


class Hands:
    """A fake clock that each timed call advances by the next of `seconds`, then by the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        self.now, self.calls, self._seconds = 0.0, 0, seconds
        monkeypatch.setattr(call_timing.time, "perf_counter", lambda: self.now)

    def __call__(self) -> None:
        self.now += self._seconds[min(self.calls, len(self._seconds) - 1)]
        self.calls += 1


@pytest.mark.parametrize(
    ("each", "budget", "inner", "batches"),
    [
        (1e-5, 1.0, 100, MAX_BATCHES),
        (0.1, 1.0, 1, 10),
        (0.6, 1.0, 1, MIN_BATCHES),
        (5.0, 1.0, 1, 1),
        (0.0, 1.0, LARGEST_BATCH, MAX_BATCHES),
    ],
)
def test_repeats_fill_the_budget_within_bounds(each: float, budget: float, inner: int, batches: int) -> None:
    cut = _batches_within_budget(each, budget)
    assert cut == (inner, batches)
    assert cut[0] * each >= MIN_BATCH_SECONDS or cut[0] == LARGEST_BATCH


def test_the_first_half_warms_up_and_one_outlier_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_start = Hands(monkeypatch, 9.0, 0.1, 0.1, *[0.3] * 5, 0.2, 0.2, 7.0, 0.2, 0.2)
    assert TeamClock(ALONE).seconds(slow_start, 1.0) == pytest.approx(0.2)
    assert slow_start.calls == 13


def test_keeping_busy_takes_about_the_time_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands(monkeypatch, 0.01)
    TeamClock(ALONE).keep_busy(hands, 2.0)
    assert hands.calls == 203


def test_alone_one_rank_agrees_with_itself() -> None:
    assert (ALONE.largest(3.0), ALONE.from_first_rank(2.0), ALONE.ranks, ALONE.nodes) == (3.0, 2.0, 1, 1)
    assert TeamClock(ALONE).burst_seconds(lambda: None) >= 0
