"""The account, which compares measured with predicted figures: when it is reported, over which steps and ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.observe.prediction_account import KEPT_STEPS, Account, TypicalStep
from meshwright.parallel.world import World
from meshwright.spec.batch_sizes import BatchStage
from meshwright.spec.job import TrainSpec
from meshwright.spec.plan import Breakdown, Predicted
from meshwright.training import accounting
from meshwright.training.accounting import Accounting, over_ranks

FIRST_STEP = 100
MINE = TypicalStep(
    steps=(6, 8), seconds=1.0, tokens_per_second_per_gpu=None, mfu=None, memory_bytes=0, resident=False, phases={}
)
PREDICTED = Predicted(memory_peak_bytes=9, step_seconds=0.5, breakdown=Breakdown(compute=0.5))


class Kept:
    """A reporter that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.accounts: list[tuple[int, Account]] = []
        self.lines: list[str] = []

    def step(self, record: dict[str, Any]) -> None:
        self.steps.append(record["step"])

    def account(self, step: int, comparison: Account, lines: list[str]) -> None:
        self.accounts.append((step, comparison))
        self.lines += lines


def start(
    monkeypatch: pytest.MonkeyPatch, predicted: Predicted | None = PREDICTED, ramp: tuple[BatchStage, ...] = ()
) -> tuple[Accounting, Kept, Any]:
    """A run that goes on after step `FIRST_STEP`, on one rank."""
    monkeypatch.setattr(accounting, "over_ranks", lambda rank_step, world: rank_step)
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
    return Accounting(session, recorder), recorder, session  # type: ignore[arg-type]


def play(accounting: Accounting, session: Any, steps: int, timeline: Any = None, late: int = 1) -> None:
    """`steps` steps whose lines are read `late` steps later."""
    for step in range(FIRST_STEP + 1, FIRST_STEP + steps + 1):
        if step - late > FIRST_STEP:
            accounting.step(line(step - late))
        session.step = step
        accounting.end_step(step, timeline)
    for step in range(FIRST_STEP + steps - late + 1, FIRST_STEP + steps + 1):
        accounting.step(line(step))


def line(step: int) -> dict[str, Any]:
    return {"step": step, "step_seconds": float(step), "memory_peak_bytes": step, "phases": {"forward": 1.0}}


@pytest.mark.parametrize("late", [0, 1])
def test_the_account_is_reported_once_after_warm_up_and_at_the_end(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    account, recorder, session = start(monkeypatch)
    play(account, session, 30, late=late)
    ((step, first),) = recorder.accounts
    assert (step, first.steps, first.step_seconds.measured) == (116, (106, 115), 110.5)
    last = account.close(None)
    assert last is not None and last.steps == (106, 130) and recorder.accounts[1] == (130, last)
    assert recorder.steps == list(range(101, 131))
    assert recorder.lines[0].startswith("steps 106 to 115: step 1m 50s, predicted 500 ms")


def test_steps_of_a_ramp_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    account, recorder, session = start(monkeypatch, ramp=(BatchStage(until=110, batch=4),))
    play(account, session, 30)
    ((step, first),) = recorder.accounts
    assert (step, first.steps) == (126, (116, 125))


def test_a_short_start_reports_the_account_at_its_end_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps, speaks in ((7, False), (8, True)):
        account, recorder, session = start(monkeypatch)
        play(account, session, steps)
        assert not recorder.accounts
        assert (account.close(None) is not None) == speaks


def test_without_a_predicted_step_time_the_account_is_reported_at_the_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    account, recorder, session = start(monkeypatch, Predicted(memory_peak_bytes=9))
    play(account, session, 30)
    assert not recorder.accounts and account.close(None) is not None and len(recorder.lines) == 1


def test_no_account_is_reported_without_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    account, recorder, session = start(monkeypatch, None)
    play(account, session, 20)
    assert account.close(None) is None and not recorder.lines and len(recorder.steps) == 20


def test_a_timeline_of_warm_up_steps_does_not_affect_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"compute": 1.0, "closing": 0.0, "idle": 0.0}
    for first, used in ((105, False), (106, True)):
        account, recorder, session = start(monkeypatch)
        play(account, session, 20, {"steps": [first, 107], "measured": figures})
        assert (recorder.accounts[0][1].recorded == (first, 107)) == used


def test_a_long_run_keeps_the_newest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    account, _, session = start(monkeypatch)
    play(account, session, KEPT_STEPS + 50)
    last = account.close(None)
    assert last is not None and last.steps == (FIRST_STEP + 51, FIRST_STEP + KEPT_STEPS + 50)


def together(world: World) -> TypicalStep:
    phases = [{"forward": 1.0, "host": 0.5}, {"forward": 3.0, "optim": 1.0}, {}]
    return over_ranks(replace(MINE, memory_bytes=[5, 1 << 40, 7][world.rank], phases=phases[world.rank]), world)


def test_ranks_combine_to_mean_phase_times_and_maximum_memory(pool: Any) -> None:
    """One of three has no phases to give."""
    for combined in pool.run(together, 3):
        assert combined == replace(MINE, memory_bytes=1 << 40, phases={"forward": 2.0, "optim": 0.5, "host": 0.25})
