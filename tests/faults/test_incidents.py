"""Incidents of real processes: ranks are stopped or killed again and again, and each incident names the right rank."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from meshwright.launch.incidents import read_incidents
from tests.training.test_processes import Job, last_step, until
from tests.training.tiny import make_tiny

INJECTIONS = 8
STEPS_BETWEEN, EVERY = 4, 10
"""Steps after a restart before the next injection, and steps between checkpoints."""


def can_begin(step: int, begun: int) -> bool:
    """Whether the job trains again and is not near a checkpoint: each loses the incidents before it from the limit."""
    return step >= begun + STEPS_BETWEEN and step // EVERY > begun // EVERY and 2 < step % EVERY < 7


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["plan.shard=2", "plan.pipeline=2", "plan.replicate=2"])
def test_each_injected_failure_names_its_rank(
    plan: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tiny, run = make_tiny(tmp_path_factory.getbasetemp() / "tiny"), tmp_path / "tiny"
    arguments = ["train", tiny, plan, "train.steps=100_000", f"checkpoint.every={EVERY}", "supervision.restarts=50"]
    job = Job([*arguments, "--runs", tmp_path], run)
    source, expected = random.Random(plan), []
    try:
        for number in range(1, INJECTIONS + 1):
            begun = last_step(run)
            until(lambda begun=begun: can_begin(last_step(run), begun) and len(job.ranks()) == 2, job)
            rank, stops = source.randrange(2), number % 2 == 0
            os.kill(job.ranks()[rank], signal.SIGSTOP if stops else signal.SIGKILL)
            expected.append(("hang" if stops else "killed", rank))
            until(lambda number=number: len(read_incidents(run)) == number, job)
    finally:
        job.process.terminate()
        job.process.wait(120)
    records = read_incidents(run)
    assert [(record["cause"], record["rank"]) for record in records] == expected
    for record in records:
        assert record["stacks"] == ["rank-0.txt", "rank-1.txt"]
        disturbed, other = (
            Path(record["evidence"], "stacks", f"rank-{rank}.txt").read_text()
            for rank in (record["rank"], 1 - record["rank"])
        )
        if record["cause"] == "hang":
            assert record["confidence"] == "certain" and "it is stopped" in disturbed
            assert "most recent call first" in other
        else:  # the other rank loses its peer within milliseconds, and may end before the agent looks
            assert "was killed by signal 9" in disturbed
            assert "most recent call first" in other or "== failure" in other
