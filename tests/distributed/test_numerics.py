"""Numerical policies on several ranks: a poisoned step leaves the run equal, bit for bit, to one with the same skip."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.format.verify import list_checkpoints
from meshwright.launch.corpus import skipped_samples
from meshwright.observe.metrics import read_metrics
from tests.distributed import cases_numerics as cases
from tests.distributed.pool import Pool
from tests.slow import quick_first
from tests.training.tiny import make_tiny, prepared, ranks

LAST = 6


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


def run(
    pool: Pool,
    tiny: Path,
    runs: Path,
    *overrides: str,
    skip: tuple[int, int] | None = None,
    replicate: int = 1,
    **disturbance: Any,
) -> Any:
    """The answers of two ranks; `skip` names samples that the run leaves out."""
    assignment = prepared(tiny, runs, *ranks(2, replicate=replicate), *overrides).assignment
    if skip is not None:
        assignment = replace(assignment, skip_samples=(skip,))
    return pool.run(partial(cases.run_with_nan, **disturbance), 2, assignment)


def same(answers: Any, expected: Any) -> bool:
    return all(
        answer[2].keys() == expectation[2].keys()
        and all(torch.equal(answer[2][name], expectation[2][name]) for name in answer[2])
        for answer, expectation in zip(answers, expected, strict=True)
    )


def losses(answer: Any) -> dict[int, float]:
    """The last loss of each step."""
    return dict(answer[1])


@pytest.mark.parametrize("mode", quick_first(1, ["async", "sync"]))
def test_a_skipped_step_changes_no_state(pool: Pool, tiny: Path, tmp_path: Path, mode: str) -> None:
    overrides = ("train.on_nonfinite=skip", "checkpoint.every=3", f"checkpoint.mode={mode}")
    answers = run(pool, tiny, tmp_path / "a", *overrides, nan_at=(3,))
    undisturbed = run(pool, tiny, tmp_path / "b", *overrides, skip_at=3)
    assert [answer[0] for answer in answers] == [""] * 2 and same(answers, undisturbed)
    steps = [line for line in read_metrics(tmp_path / "a" / "tiny" / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["step"] for line in steps if line.get("update_skipped")] == [3] and steps[2]["loss"] is None
    assert any(
        "step 3: loss and grad_norm not finite" in text and "the update was skipped" in text for text in answers[0][3]
    )
    assert [entry["step"] for entry in list_checkpoints(tmp_path / "a" / "tiny") if entry["ok"]][-1] == LAST


def test_a_resumed_run_continues_with_the_updates_that_were_applied(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    """The bias correction of the moments counts updates, not steps."""
    overrides = ("train.on_nonfinite=skip",)
    uninterrupted = run(pool, tiny, tmp_path / "a", *overrides, nan_at=(3,))
    run(pool, tiny, tmp_path / "b", *overrides, nan_at=(3,), stop_at=4)
    resumed = run(pool, tiny, tmp_path / "b", *overrides)
    assert [step for step, _ in resumed[0][1]] == [5, 6] and same(uninterrupted, resumed)


@pytest.mark.slow
def test_a_rollback_after_a_transient_failure_gives_the_undisturbed_run(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    overrides = ("train.on_nonfinite=rollback", "checkpoint.every=2", "checkpoint.mode=async")
    answers = run(pool, tiny, tmp_path / "a", *overrides, nan_at=(5,), is_permanent=True)
    undisturbed = run(pool, tiny, tmp_path / "b", *overrides)
    assert [answer[0] for answer in answers] == [""] * 2 and same(answers, undisturbed)
    assert losses(answers[0]) == losses(undisturbed[0])
    steps = [step for step, _ in answers[0][1]]
    assert steps[:5] == [1, 2, 3, 4, 5] and steps[-2:] == [5, 6] and len(steps) > LAST
    lines = [
        [line["step"] for line in read_metrics(tmp_path / name / "tiny" / "metrics.jsonl") if line["kind"] == "step"]
        for name in "ab"
    ]
    assert lines[0] == lines[1] == [1, 2, 3, 4, 5, 6]
    assert any(re.search("step 5: .*; back to step [24] from storage", text) for text in answers[0][3])


@pytest.mark.slow
def test_skipped_samples_give_the_run_that_never_read_them(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    """Also after a restart, which finds them in the checkpoint."""
    overrides = ("train.on_nonfinite=rollback_skip", "checkpoint.every=2")
    answers = run(pool, tiny, tmp_path / "a", *overrides, nan_at=(4,), stop_at=5)
    assert "Preempted" in answers[0][0] and any(
        "back to step 2 from storage; samples 24 to 31 are left out" in text for text in answers[0][3]
    )
    answers = run(pool, tiny, tmp_path / "a", *overrides)
    without_samples = run(pool, tiny, tmp_path / "b", *overrides, skip=(24, 32))
    assert [step for step, _ in answers[0][1]] == [6] and same(answers, without_samples)
    assert skipped_samples(tmp_path / "a" / "tiny") == ((24, 32),)


@pytest.fixture(scope="module")
def undisturbed_replicas(
    pool: Pool, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[int, int] | None], Any]:
    """The answers of two replicas that nothing disturbs, by the samples that they leave out."""

    @cache
    def answers(left_out: tuple[int, int] | None) -> Any:
        runs = tmp_path_factory.mktemp("undisturbed")
        return run(pool, tiny, runs, "checkpoint.every=2", replicate=2, skip=left_out)

    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "left_out"),
    [("rollback", None), ("skip", None), ("rollback_skip", (32, 40))],
)
def test_ranks_go_back_together_if_the_reduced_gradients_of_one_replica_are_not_finite(
    pool: Pool,
    tiny: Path,
    tmp_path: Path,
    undisturbed_replicas: Callable[[tuple[int, int] | None], Any],
    action: str,
    left_out: tuple[int, int] | None,
) -> None:
    """The loss is finite on all ranks, and the norm on those of the other replica, which apply the update."""
    overrides = (f"train.on_nonfinite={action}", "checkpoint.every=2")
    answers = run(pool, tiny, tmp_path / "a", *overrides, replicate=2, nan_at=(5,), reduced=True)
    undisturbed = undisturbed_replicas(left_out)
    assert [answer[0] for answer in answers] == [""] * 2 and same(answers, undisturbed)
    assert losses(answers[0]) == losses(undisturbed[0]) == losses(answers[1])
    text = "step 5: grad_norm not finite .*; 1 of 2 replicas of the model skipped the update; back to step 4"
    assert all(any(re.search(text, event) for event in answer[3]) for answer in answers)


@pytest.mark.slow
def test_a_spike_in_the_reduced_gradients_of_one_replica_takes_all_ranks_back(
    pool: Pool, tiny: Path, tmp_path: Path
) -> None:
    overrides = ("train.on_spike=rollback", "train.steps=30", "train.spike_factor=20", "checkpoint.every=12")
    answers = run(pool, tiny, tmp_path / "a", *overrides, replicate=2, nan_at=(26,), reduced=True, value=3e3)
    undisturbed = run(pool, tiny, tmp_path / "b", *overrides, replicate=2)
    assert same(answers, undisturbed) and losses(answers[0]) == losses(undisturbed[0])
    assert all(
        any("step 26: spike" in event and "back to step 24" in event for event in answer[3]) for answer in answers
    )


@pytest.mark.slow
def test_a_failure_that_returns_ends_the_run(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    overrides = ("train.on_nonfinite=rollback", "checkpoint.every=2")
    answers = run(pool, tiny, tmp_path, *overrides, nan_at=(3,), times=100)
    assert [answer[0].split(":")[0] for answer in answers] == ["NumericalFailure"] * 2
    assert "3 rollbacks to step 2 did not help" in answers[0][0]
    without_checkpoint = run(pool, tiny, tmp_path / "none", "train.on_nonfinite=rollback", nan_at=(1,))
    assert "there is no checkpoint to go back to" in without_checkpoint[0][0]


def test_state_that_is_not_finite_is_never_saved(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    """A weight stays poisoned, and every update is skipped until the end."""
    overrides = ("train.on_nonfinite=skip", "checkpoint.every=2")
    answers = run(pool, tiny, tmp_path, *overrides, nan_at=(3,), is_permanent=True)
    assert any(f"no checkpoint of step {LAST}: weights or moments are not finite" in text for text in answers[0][3])
    assert [entry["step"] for entry in list_checkpoints(tmp_path / "tiny") if entry["ok"]] == [2]


def test_a_spike_of_the_gradient_norm_is_skipped_on_all_ranks(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    overrides = ("train.on_spike=skip", "train.steps=30", "train.spike_factor=20")
    answers = run(pool, tiny, tmp_path / "a", *overrides, nan_at=(25,), name="norm.weight", value=3e3)
    undisturbed = run(pool, tiny, tmp_path / "b", *overrides, skip_at=25)
    assert same(answers, undisturbed) and any("step 25: spike" in text for text in answers[0][3])
