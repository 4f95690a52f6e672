"""Supervised runs of real processes: a killed or stopped rank is replaced, and training continues by itself."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch.incidents import read_incidents
from meshwright.observe.metrics import read_metrics
from tests.training.test_processes import Job, last_step, until
from tests.training.tiny import make_tiny

STEPS = 60


def arguments(tmp_path_factory: pytest.TempPathFactory, runs: Path, *more: str) -> list[object]:
    tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    return ["train", tiny, f"train.steps={STEPS}", "checkpoint.every=10", *more, "--runs", runs]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]


def only_incident(run: Path) -> dict[str, Any]:
    """The one incident of a run."""
    (incident,) = read_incidents(run)
    return incident


def test_training_goes_on_after_a_rank_was_killed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path / "tiny"
    job = Job(arguments(tmp_path_factory, tmp_path, "supervision.restarts=1"), run)
    until(lambda: last_step(run) >= 12, job)
    os.kill(job.ranks()[0], signal.SIGKILL)
    assert job.process.wait(180) == 0, job.output()
    incident = only_incident(run)
    assert (incident["cause"], incident["rank"]) == ("killed", 0) and "killed by signal 9" in incident["reason"]
    assert re.fullmatch(r"restart 1 of 1 from the checkpoint of step \d+0", incident["answer"])
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_stopped_rank_counts_as_hung_and_is_replaced(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path / "tiny"
    job = Job(arguments(tmp_path_factory, tmp_path, "supervision.restarts=1"), run)
    until(lambda: last_step(run) >= 12, job)
    os.kill(job.ranks()[1], signal.SIGSTOP)
    stopped = time.monotonic()
    until(lambda: "restart 1 of 1" in job.output(), job)
    assert time.monotonic() - stopped > 4
    assert job.process.wait(180) == 0, job.output()
    assert re.search(r"rank 1 has made no progress for ([5-9]|\d\d) s in step ", job.output()), job.output()
    incident = only_incident(run)
    assert (incident["cause"], incident["rank"], incident["confidence"]) == ("hang", 1, "certain")
    assert [wait["rank"] for wait in incident["waiting"]] == [0] and "and is stopped" in incident["reason"]
    assert re.fullmatch(r"restart 1 of 1 from the checkpoint of step \d+0", incident["answer"])
    stacks = Path(incident["evidence"], "stacks")
    assert "State:\tT (stopped)" in (stacks / "rank-1.txt").read_text()
    waiting = (stacks / "rank-0.txt").read_text()
    assert "most recent call first" in waiting and "train_step.py" in waiting
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 1))
