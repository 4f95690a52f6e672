"""When a start is held to its plan and over which steps, and what all ranks together make of their figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.observe.prediction_account import KEPT_STEPS, Account, TypicalStep
from meshwright.parallel.world import World
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


def start(monkeypatch: pytest.MonkeyPatch, predicted: Predicted | None = PREDICTED) -> tuple[Accounting, Kept, Any]:
    """A run that goes on after step `FIRST_STEP`, on one rank."""
    monkeypatch.setattr(accounting, "over_ranks", lambda found, world: found)
    session = SimpleNamespace(
        step=FIRST_STEP, plan=SimpleNamespace(predicted=predicted), world=None, folder=Path("runs/demo")
    )
    kept = Kept()
    return Accounting(session, kept), kept, session  # type: ignore[arg-type]


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
def test_it_speaks_once_behind_the_warm_up_of_this_start_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    held, kept, session = start(monkeypatch)
    play(held, session, 30, late=late)
    ((step, first),) = kept.accounts
    assert (step, first.steps, first.step_seconds.measured) == (116, (106, 115), 110.5)
    last = held.close(None)
    assert last is not None and last.steps == (106, 130) and kept.accounts[1] == (130, last)
    assert kept.steps == list(range(101, 131))
    assert kept.lines[0].startswith("steps 106 to 115: step 1m 50s, predicted 500 ms")


def test_a_short_start_speaks_at_its_end_alone_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps, speaks in ((7, False), (8, True)):
        held, kept, session = start(monkeypatch)
        play(held, session, steps)
        assert not kept.accounts
        assert (held.close(None) is not None) == speaks


def test_without_a_predicted_step_time_it_speaks_at_the_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    held, kept, session = start(monkeypatch, Predicted(memory_peak_bytes=9))
    play(held, session, 30)
    assert not kept.accounts and held.close(None) is not None and len(kept.lines) == 1


def test_nothing_is_said_where_nothing_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    held, kept, session = start(monkeypatch, None)
    play(held, session, 20)
    assert held.close(None) is None and not kept.lines and len(kept.steps) == 20


def test_a_timeline_of_cold_steps_says_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"compute": 1.0, "closing": 0.0, "idle": 0.0}
    for first, used in ((105, False), (106, True)):
        held, kept, session = start(monkeypatch)
        play(held, session, 20, {"steps": [first, 107], "measured": figures})
        assert (kept.accounts[0][1].recorded == (first, 107)) == used


def test_a_long_run_keeps_the_newest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    held, _, session = start(monkeypatch)
    play(held, session, KEPT_STEPS + 50)
    last = held.close(None)
    assert last is not None and last.steps == (FIRST_STEP + 51, FIRST_STEP + KEPT_STEPS + 50)


def together(world: World) -> TypicalStep:
    phases = [{"forward": 1.0, "host": 0.5}, {"forward": 3.0, "optim": 1.0}, {}]
    return over_ranks(replace(MINE, memory_bytes=[5, 1 << 40, 7][world.rank], phases=phases[world.rank]), world)


def test_ranks_give_the_mean_of_their_phases_and_the_fullest_memory(pool: Any) -> None:
    """One of three has no phases to give."""
    for found in pool.run(together, 3):
        assert found == replace(MINE, memory_bytes=1 << 40, phases={"forward": 2.0, "optim": 0.5, "host": 0.25})
