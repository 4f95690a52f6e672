"""No false alarm in recorded and generated sequences of steps, and a hang is found in time; the clock is a number."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.policies.hang import CPU_SECONDS, GPU_SECONDS, HangWatch
from tests.slow import examples

SEQUENCES, STEPS, MARKS = examples(1_000, 5_000), 30, 4
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def play(watch: HangWatch, seconds: list[float], poll: float = 1.0) -> float | None:
    """A rank trains steps of these durations, with `MARKS` marks of progress in each; the time of the first alarm."""
    now, count = 0.0, 1
    watch.update(0, "start", 0, 0, count, now)
    for step, duration in enumerate(seconds, 1):
        for action in range(MARKS):
            count += 1
            watch.update(0, "train" if step > 1 else "compile", step, action, count, now)
            end = now + duration / MARKS
            while now + poll < end:
                now += poll
                if watch.hung(now):
                    return now
            now = end
            if watch.hung(now):
                return now
    return None


def stretched(source: random.Random, times: list[float]) -> list[float]:
    """`times` with stragglers of up to three typical steps."""
    typical = statistics.median(times)
    for _ in range(source.randrange(4)):
        place = source.randrange(len(times))
        times[place] = max(times[place], source.uniform(1, 3) * typical)
    return times


def generated(source: random.Random) -> list[float]:
    """Step times of a run: a typical time and noise."""
    typical, spread = 10 ** source.uniform(-2, 2), source.uniform(0.01, 0.3)
    return [typical * source.lognormvariate(0, spread) for _ in range(STEPS)]


def test_no_false_alarm_in_generated_sequences() -> None:
    source = random.Random(30)
    runs = (stretched(source, generated(source)) for _ in range(SEQUENCES))
    assert not [times for times in runs if play(HangWatch(CPU_SECONDS), times, poll=max(times))]


def test_no_false_alarm_in_sequences_of_recorded_steps() -> None:
    """Steps drawn from one recorded run each, at the speed of a machine up to 30 times as slow or fast.

    The first recorded step compiles, as that of every run does.
    """
    files = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))]
    recorded = [times for file in files for times in step_lists(file)]
    assert len(recorded) > 20
    assert not [times for times in recorded if play(HangWatch(GPU_SECONDS), times)]
    source = random.Random(31)
    for _ in range(SEQUENCES):
        (first, *times), scale = source.choice(recorded), 30 ** source.uniform(-1, 1)
        drawn = stretched(source, [scale * first, *(scale * source.choice(times) for _ in range(STEPS))])
        assert play(HangWatch(CPU_SECONDS), drawn, poll=max(drawn)) is None, drawn


def step_lists(value: object) -> list[list[float]]:
    """All lists of step times in a file of results."""
    if isinstance(value, dict):
        own = [v for key, v in value.items() if key == "step_seconds_all" and isinstance(v, list)]
        return own + [times for v in value.values() for times in step_lists(v)]
    return [times for v in value for times in step_lists(v)] if isinstance(value, list) else []


@given(typical=st.floats(0.01, 100), hangs_after=st.integers(3, 20))
def test_a_hang_is_found_within_its_limit(typical: float, hangs_after: int) -> None:
    watch = HangWatch(CPU_SECONDS)
    assert play(watch, [typical] * hangs_after, poll=typical) is None
    last = typical * (hangs_after - 1 / MARKS)
    limit = max(3 * typical + 5, CPU_SECONDS)
    assert watch.hung(last + limit * 0.99) is None
    assert watch.hung(last + limit * 1.01) is not None


def test_before_a_step_is_known_its_time_is_not_guessed() -> None:
    watch = HangWatch(CPU_SECONDS)
    watch.update(0, "train", 7, 0, 1, 0.0)
    assert watch.hung(1799) is None and watch.hung(1801) is not None


def test_the_rank_that_others_wait_for_is_named() -> None:
    watch = HangWatch(CPU_SECONDS)
    play(watch, [0.1] * 8)
    for rank, action in enumerate((5, 2, 5, 4)):
        watch.update(rank, "train", 9, action, 99, 1.0)
    assert watch.hung(5.9) is None and watch.hung(6.5) == (1, 5.5)


@pytest.mark.parametrize(("phase", "alarm"), [("compile", 1800), ("validate", 600), ("save", 1800), ("start", 1800)])
def test_known_phases_have_limits_of_their_own(phase: str, alarm: float) -> None:
    watch = HangWatch(CPU_SECONDS)
    watch.update(0, phase, 0, 0, 1, 0.0)
    assert watch.hung(alarm - 1) is None and watch.hung(alarm + 1) is not None


def test_a_watch_that_was_stopped_counts_anew() -> None:
    watch = HangWatch(CPU_SECONDS)
    play(watch, [0.1] * 8)
    watch.resume(100.0)
    assert watch.hung(104.0) is None and watch.hung(106.0) is not None


def test_of_ranks_in_the_same_action_the_stopped_one_hangs() -> None:
    watch = HangWatch(CPU_SECONDS)
    play(watch, [0.1] * 8)
    for rank, stopped in enumerate((False, True, False)):
        watch.update(rank, "train", 9, 3, 99, 1.0)
        watch.update(rank, "train", 9, 3, 99, 1.5, stopped=stopped)
    hung = watch.hung(7.0)
    assert hung is not None and hung[0] == 1


def test_a_stopped_rank_hangs_though_it_came_further_and_stopped_later() -> None:
    watch = HangWatch(CPU_SECONDS)
    play(watch, [0.1] * 8)
    watch.update(0, "train", 9, 3, 99, 1.0)
    watch.update(1, "train", 9, 4, 99, 1.5, stopped=True)
    hung = watch.hung(6.4)  # rank 0 is over the limit, rank 1 is not yet
    assert hung is not None and hung[0] == 1


@pytest.mark.parametrize("phase", ["start", "save", "compile", "train"])
def test_ranks_that_a_signal_has_stopped_are_noticed_in_every_phase(phase: str) -> None:
    watch = HangWatch(5.0)
    for now in range(21):
        for rank in range(2):
            watch.update(rank, phase, 3, 0, min(now, 4), float(now), stopped=now > 4)
        hung = watch.hung(float(now))
        if now <= 10:
            assert hung is None
    assert hung is not None and hung[0] == 0
    for now in range(21, 26):
        for rank in range(2):
            watch.update(rank, phase, 3, 0, now, float(now))
        assert watch.hung(float(now)) is None
