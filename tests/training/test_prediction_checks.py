"""The prediction check, which compares measured with predicted figures: when it is reported, over which steps and
ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.observe.prediction_check import KEPT_STEPS, PredictionCheck, TypicalStep
from meshwright.parallel.world import World
from meshwright.spec.batch_sizes import BatchStage
from meshwright.spec.job import TrainSpec
from meshwright.spec.plan import Breakdown, Predicted
from meshwright.training import prediction_checks
from meshwright.training.prediction_checks import PredictionChecks, over_ranks

FIRST_STEP = 100
MINE = TypicalStep(
    steps=(6, 8), seconds=1.0, tokens_per_second_per_gpu=None, mfu=None, memory_bytes=0, resident=False, phases={}
)
PREDICTED = Predicted(memory_peak_bytes=9, step_seconds=0.5, breakdown=Breakdown(compute=0.5))


class Kept:
    """A reporter that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.prediction_checks: list[tuple[int, PredictionCheck]] = []
        self.lines: list[str] = []

    def step(self, record: dict[str, Any]) -> None:
        self.steps.append(record["step"])

    def prediction_check(self, step: int, comparison: PredictionCheck, lines: list[str]) -> None:
        self.prediction_checks.append((step, comparison))
        self.lines += lines


def start(
    monkeypatch: pytest.MonkeyPatch, predicted: Predicted | None = PREDICTED, ramp: tuple[BatchStage, ...] = ()
) -> tuple[PredictionChecks, Kept, Any]:
    """A run that goes on after step `FIRST_STEP`, on one rank."""
    monkeypatch.setattr(prediction_checks, "over_ranks", lambda rank_step, world: rank_step)
    train = TrainSpec(steps=1000, global_batch=8, batch_ramp=ramp)
    session = SimpleNamespace(
        run=SimpleNamespace(train=train),
        step=FIRST_STEP,
        plan=SimpleNamespace(predicted=predicted),
        world=None,
        folder=Path("runs/demo"),
        rollouts=None,
    )
    recorder = Kept()
    return PredictionChecks(session, recorder), recorder, session  # type: ignore[arg-type]


def play(prediction_checks: PredictionChecks, session: Any, steps: int, timeline: Any = None, late: int = 1) -> None:
    """`steps` steps whose lines are read `late` steps later."""
    for step in range(FIRST_STEP + 1, FIRST_STEP + steps + 1):
        if step - late > FIRST_STEP:
            prediction_checks.step(line(step - late))
        session.step = step
        prediction_checks.end_step(step, timeline)
    for step in range(FIRST_STEP + steps - late + 1, FIRST_STEP + steps + 1):
        prediction_checks.step(line(step))


def line(step: int) -> dict[str, Any]:
    return {"step": step, "step_seconds": float(step), "memory_peak_bytes": step, "phases": {"forward": 1.0}}


@pytest.mark.parametrize("late", [0, 1])
def test_the_account_is_reported_once_after_warm_up_and_at_the_end(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    prediction_check, recorder, session = start(monkeypatch)
    play(prediction_check, session, 30, late=late)
    ((step, first),) = recorder.prediction_checks
    assert (step, first.steps, first.step_seconds.measured) == (116, (106, 115), 110.5)
    last = prediction_check.close(None)
    assert last is not None and last.steps == (106, 130) and recorder.prediction_checks[1] == (130, last)
    assert recorder.steps == list(range(101, 131))
    assert recorder.lines[0].startswith("steps 106 to 115: step 1m 50s, predicted 500 ms")


def test_steps_of_a_ramp_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction_check, recorder, session = start(monkeypatch, ramp=(BatchStage(until=110, batch=4),))
    play(prediction_check, session, 30)
    ((step, first),) = recorder.prediction_checks
    assert (step, first.steps) == (126, (116, 125))


def test_a_short_start_reports_the_account_at_its_end_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps, speaks in ((7, False), (8, True)):
        prediction_check, recorder, session = start(monkeypatch)
        play(prediction_check, session, steps)
        assert not recorder.prediction_checks
        assert (prediction_check.close(None) is not None) == speaks


def test_without_a_predicted_step_time_the_account_is_reported_at_the_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction_check, recorder, session = start(monkeypatch, Predicted(memory_peak_bytes=9))
    play(prediction_check, session, 30)
    assert not recorder.prediction_checks and prediction_check.close(None) is not None and len(recorder.lines) == 1


def test_no_account_is_reported_without_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction_check, recorder, session = start(monkeypatch, None)
    play(prediction_check, session, 20)
    assert prediction_check.close(None) is None and not recorder.lines and len(recorder.steps) == 20


def test_a_timeline_of_warm_up_steps_does_not_affect_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"compute": 1.0, "closing": 0.0, "idle": 0.0}
    for first, used in ((105, False), (106, True)):
        prediction_check, recorder, session = start(monkeypatch)
        play(prediction_check, session, 20, {"steps": [first, 107], "measured": figures})
        assert (recorder.prediction_checks[0][1].recorded == (first, 107)) == used


def test_a_long_run_keeps_the_newest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction_check, _, session = start(monkeypatch)
    play(prediction_check, session, KEPT_STEPS + 50)
    last = prediction_check.close(None)
    assert last is not None and last.steps == (FIRST_STEP + 51, FIRST_STEP + KEPT_STEPS + 50)


def together(world: World) -> TypicalStep:
    phases = [{"forward": 1.0, "host": 0.5}, {"forward": 3.0, "optim": 1.0}, {}]
    return over_ranks(replace(MINE, memory_bytes=[5, 1 << 40, 7][world.rank], phases=phases[world.rank]), world)


def test_ranks_combine_to_mean_phase_times_and_maximum_memory(pool: Any) -> None:
    """One of three has no phases to give."""
    for combined in pool.run(together, 3):
        assert combined == replace(MINE, memory_bytes=1 << 40, phases={"forward": 2.0, "optim": 0.5, "host": 0.25})
