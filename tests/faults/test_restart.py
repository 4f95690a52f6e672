"""A supervised run of real processes: ranks die, and training continues by itself with the losses of an undisturbed run."""

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
from tests.training.test_processes import Job, alive, last_step, until
from tests.training.tiny import make_tiny

STEPS = 60


def words(tmp_path_factory: pytest.TempPathFactory, runs: Path, *more: str) -> list[object]:
    tiny = make_tiny(tmp_path_factory.getbasetemp() / "tiny")
    return ["train", tiny, f"train.steps={STEPS}", "checkpoint.every=10", *more, "--runs", runs]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]


def only_incident(run: Path) -> dict[str, Any]:
    """The one incident of a run."""
    (incident,) = read_incidents(run)
    return incident


@pytest.mark.slow
def test_a_killed_rank_is_replaced_and_the_losses_are_those_of_an_undisturbed_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    slow = "train.loss_chunk=1"
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
    calm = Job(words(tmp_path_factory, tmp_path / "calm", slow), tmp_path / "calm" / "tiny")
    assert calm.process.wait(120) == 0, calm.output()
    run = tmp_path / "killed" / "tiny"
    job = Job(words(tmp_path_factory, tmp_path / "killed", slow), run)
    until(lambda: last_step(run) >= 15, job)
    ranks = job.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: "restart 1 of 3" in job.output(), job)
    assert time.monotonic() - killed < 5
    code = job.process.wait(120)
    assert code == 0, job.output()
    assert "rank 1 was killed by signal 9" in job.output() and "resumed after step " in job.output()
    assert losses(run) == losses(calm.run)
    incident = only_incident(run)
    assert (incident["cause"], incident["rank"], incident["code"]) == ("killed", 1, -signal.SIGKILL)
    assert incident["stacks"] == ["rank-0.txt", "rank-1.txt"]
    assert "was killed by signal 9" in Path(incident["evidence"], "stacks", "rank-1.txt").read_text()
    assert not [pid for pid in ranks.values() if alive(pid)]


def test_a_stopped_rank_counts_as_hung_and_is_replaced(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path / "tiny"
    job = Job(words(tmp_path_factory, tmp_path), run)
    until(lambda: last_step(run) >= 12, job)
    os.kill(job.ranks()[1], signal.SIGSTOP)
    stopped = time.monotonic()
    until(lambda: "restart 1 of 3" in job.output(), job)
    assert 4 < time.monotonic() - stopped < 10
    assert job.process.wait(60) == 0, job.output()
    assert re.search(r"rank 1 has made no progress for [5-9] s in step ", job.output()), job.output()
    incident = only_incident(run)
    assert (incident["cause"], incident["rank"], incident["confidence"]) == ("hang", 1, "certain")
    assert [wait["rank"] for wait in incident["waiting"]] == [0] and "and is stopped" in incident["reason"]
    assert incident["answer"] == "restart 1 of 3 from the checkpoint of step 10"
    stacks = Path(incident["evidence"], "stacks")
    assert "State:\tT (stopped)" in (stacks / "rank-1.txt").read_text()
    waiting = (stacks / "rank-0.txt").read_text()
    assert "most recent call first" in waiting and "train_step.py" in waiting
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 1))
