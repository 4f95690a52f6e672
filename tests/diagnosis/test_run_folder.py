"""The spans of a run that has trained: the slow rank of two is named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshwright.diagnosis.stragglers import diagnose_run
from meshwright.parallel.world import World
from meshwright.schedules.action import COMPUTE, Action
from meshwright.spec.errors import BadInput
from meshwright.spec.run import Assignment
from tests.cli.command import meshwright
from tests.distributed import cases_training as cases
from tests.distributed.pool import Pool
from tests.training.tiny import make_tiny, prepared, ranks

STEPS, SLOW_RANK, DEVICE_SECONDS = 20, 1, 0.006


def run_with_slow_rank(world: World, assignment: Assignment) -> None:
    """Train; each forward and backward of a unit takes at least `DEVICE_SECONDS`, on one rank four times as long.

    The ranks sleep, as if a device computed, because two cores shared with other processes make small times random.
    Half as long again was lost among those when the machine had other work.
    """
    from meshwright.observe.recorder import StepRecorder

    action_span = StepRecorder.action
    seconds = DEVICE_SECONDS * (4.0 if world.rank == SLOW_RANK else 1.0)

    @contextmanager
    def on_device(recorder: Any, index: int, action: Action, *arguments: Any) -> Iterator[None]:
        with action_span(recorder, index, action, *arguments):
            begin = time.perf_counter()
            yield
            if action.op in COMPUTE:
                time.sleep(max(0.0, begin + seconds - time.perf_counter()))

    StepRecorder.action = on_device  # type: ignore[method-assign]
    try:
        cases.run(world, assignment)
    finally:
        StepRecorder.action = action_span


def test_the_slow_rank_of_a_real_run_is_named_within_20_steps(pool: Pool, tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny")
    values = (f"train.steps={STEPS}", "checkpoint.every=0", "checkpoint.at_end=false")
    assignment = prepared(tiny, tmp_path, *ranks(2), *values).assignment
    pool.run(run_with_slow_rank, 2, assignment)
    found = diagnose_run(Path(assignment.folder))
    assert len(found.steps) >= STEPS // 2
    assert (found.cause, found.rank) == ("compute", SLOW_RANK), found
    assert found.contributions["compute"] > 0.1
    assert found.replayed_seconds == pytest.approx(found.step_seconds, rel=0.3)
    answer = meshwright("stragglers", assignment.folder, "--json")
    assert answer.json["rank"] == SLOW_RANK


def test_a_folder_without_spans_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"recorded unless observe\.spans is false"):
        diagnose_run(tmp_path)
