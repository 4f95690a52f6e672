"""When a run on several ranks writes checkpoints, and how it ends when its disk fails between two of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.checkpoint.format.files import add_reserve
from meshwright.checkpoint.format.verify import list_checkpoints
from meshwright.launch.disk import checkpoint_bytes
from meshwright.observe.metrics import read_metrics
from meshwright.optim.schedule import learning_rate
from tests.checkpoint.made import stored
from tests.distributed import cases_saving as cases
from tests.distributed.pool import Pool
from tests.slow import quick_first
from tests.training.tiny import make_tiny, prepared, ranks

STEPS = 6


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.getbasetemp() / "tiny")


def intact(runs: Path) -> list[int]:
    return [
        checkpoint["step"]
        for checkpoint in list_checkpoints(runs / "tiny")
        if checkpoint["committed"] and checkpoint["ok"]
    ]


def test_by_the_clock_the_first_rank_decides_for_all(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    """Steps of 5 minutes: due when step 2 ends, and 30 minutes later the run is over. The other rank's clock stands still."""
    assignment = prepared(tiny, tmp_path, *ranks(2)).assignment
    pool.run(cases.timed, 2, assignment, (300.0, 0.0))
    assert intact(tmp_path) == [3, STEPS]


def test_by_the_clock_nothing_is_written_before_it_is_time(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2), "checkpoint.at_end=false").assignment
    pool.run(cases.timed, 2, assignment, (99.0, 10_000.0))
    assert intact(tmp_path) == []


def test_a_disk_that_takes_no_more_metrics_ends_the_run_on_all_ranks_with_a_checkpoint(
    pool: Pool, tiny: Path, tmp_path: Path
) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2)).assignment
    answers = pool.run(cases.disturbed, 2, assignment, 2, cases.full_for_metrics)
    assert answers[0] == answers[1]
    step, outcome, code, text = answers[0]
    assert (outcome, code) == ("OutOfResources", 3) and intact(tmp_path) == [step] and 2 <= step <= 3
    assert text.startswith(f"rank 0 of 2: ended after step {step}; started again, the run ")
    assert "metrics.jsonl: No space left on device" in text
    pool.run(cases.disturbed, 2, prepared(tiny, tmp_path, *ranks(2)).assignment, 0, cases.deleted)
    assert intact(tmp_path)[-1] == STEPS


@pytest.mark.parametrize("happens", [cases.full, cases.deleted])
def test_a_run_ends_without_a_checkpoint_if_none_fits_on_the_disk(
    pool: Pool, tiny: Path, tmp_path: Path, happens: Callable[..., None]
) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2)).assignment
    answers = pool.run(cases.disturbed, 2, assignment, 2, happens)
    assert answers[0] == answers[1]
    step, outcome, code, text = answers[0]
    assert (outcome, code) == ("OutOfResources", 3) and 2 <= step <= 3
    reason = "No space left on device" if happens is cases.full else "no longer exists: it was deleted or moved"
    assert f"ended after step {step}, without a checkpoint: " in text and reason in text
    assert (tmp_path / "tiny").exists() == (happens is cases.full)


def test_a_failure_in_the_last_step_counts_too(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    assignment = prepared(tiny, tmp_path, *ranks(2)).assignment
    answers = pool.run(cases.disturbed, 2, assignment, STEPS, cases.full_for_metrics)
    assert answers[0] == answers[1] and answers[0][:3] == (STEPS, "OutOfResources", 3)
    assert intact(tmp_path) == [STEPS]


@pytest.mark.parametrize("tied", quick_first(1, [True, False]))
def test_a_checkpoint_needs_the_estimated_bytes_and_no_file_of_the_run_folder(
    pool: Pool, tiny: Path, tmp_path: Path, tied: bool
) -> None:
    prepared_run = prepared(tiny, tmp_path, *ranks(2), "checkpoint.every=3", f"model.tied={str(tied).lower()}")
    texts = {name: (prepared_run.folder / name).read_text() for name in ("config.yaml", "plan.yaml")}
    answers = pool.run(cases.disturbed, 2, prepared_run.assignment, 2, cases.without_config)
    assert [outcome for _, outcome, _, _ in answers] == ["nothing"] * 2 and intact(tmp_path) == [3, STEPS]
    last_checkpoint = prepared_run.folder / "checkpoints" / f"step-{STEPS:08d}"
    assert {name: (last_checkpoint / name).read_text() for name in texts} == texts
    model = prepared_run.assignment.run.model
    assert sum(record.bytes for record in stored(last_checkpoint).values()) == checkpoint_bytes(model)
    assert sum(file.stat().st_size for file in last_checkpoint.iterdir()) <= add_reserve(checkpoint_bytes(model))


def test_a_finished_run_is_continued_when_its_steps_are_raised(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    first = prepared(tiny, tmp_path, *ranks(2)).assignment
    pool.run(cases.disturbed, 2, first, 0, cases.deleted)
    shutil.copy(tmp_path / "tiny" / "metrics.jsonl", tmp_path / "before.jsonl")
    longer = prepared(tiny, tmp_path, *ranks(2), "train.steps=9")
    assert longer.resumes and "steps: 9" in (longer.folder / "config.yaml").read_text()
    pool.run(cases.disturbed, 2, longer.assignment, 0, cases.deleted)
    lines = read_metrics(tmp_path / "tiny" / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    earlier_steps = [line for line in read_metrics(tmp_path / "before.jsonl") if line["kind"] == "step"]
    assert steps[:STEPS] == earlier_steps and [line["step"] for line in steps] == list(range(1, 10))
    first_train, longer_train = first.run.train, longer.assignment.run.train
    assert [line["lr"] for line in steps[STEPS:]] == [learning_rate(longer_train, step) for step in (7, 8, 9)]
    texts = [line["text"] for line in lines if line["kind"] == "event" and "raised" in line["text"]]
    assert texts == [
        "train.steps raised from 6 to 9: from here on the learning rate follows the longer schedule; "
        f"at step 6 it is {learning_rate(longer_train, 6):.3g} there and was {learning_rate(first_train, 6):.3g}"
    ]
    continued = prepared(tiny, tmp_path, *ranks(2), "train.steps=9").assignment
    pool.run(cases.disturbed, 2, continued, 0, cases.deleted)
    assert sum("raised" in line.get("text", "") for line in read_metrics(tmp_path / "tiny" / "metrics.jsonl")) == 1
