"""A job whose rank dies while a checkpoint is being written: the launcher waits for the writer, which completes it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.training.test_processes import Job, alive, intact, last_step, status, stopped, until
from tests.training.tiny import make_tiny


def writer_of(rank: int) -> int:
    """The process id of a rank's writer."""
    lists = [path.read_text() for path in Path(f"/proc/{rank}/task").glob("*/children")]
    children = [int(pid) for text in lists for pid in text.split()]
    return next(
        pid for pid in children if b"meshwright.checkpoint.write.writer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


@pytest.mark.slow
def test_a_snapshot_that_is_complete_when_a_rank_dies_becomes_a_checkpoint(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tiny, run = make_tiny(tmp_path_factory.getbasetemp() / "tiny"), tmp_path / "tiny"
    every = ["checkpoint.every=10", "checkpoint.mode=async", "supervision.restarts=0"]
    job = Job(["train", tiny, "cluster.gpus_per_node=2", "train.steps=100000", *every, "--runs", tmp_path], run)
    try:
        until(lambda: bool(run.exists() and intact(run)), job)
        ranks = job.ranks()
        writers = [writer_of(ranks[rank]) for rank in range(2)]
        os.kill(
            writers[1], signal.SIGSTOP
        )  # the first rank's writer is busy after a commit too, which delays the next save
        until(lambda: stopped(writers[1]), job)
        committed, begun = intact(run)[-1], last_step(run) + 25
        until(lambda: last_step(run) >= begun, job)
        assert intact(run)[-1] == committed and list((run / "checkpoints").glob(".*.partial")), "its save is in flight"

        def act(pids: dict[int, int]) -> None:
            os.kill(pids[1], signal.SIGKILL)
            until(lambda: not alive(pids[0]) or not alive(pids[1]), job)
            os.kill(writers[1], signal.SIGCONT)

        ended = job.end(act)
    finally:
        job.process.kill()
        job.process.wait()
    assert ended.code != 0 and "rank 1" in ended.output
    assert committed < ended.checkpoints[-1] <= begun, "the snapshot that was staged before the rank died"
    assert all(not alive(writer) or status(Path(f"/proc/{writer}"))["State"].startswith("Z") for writer in writers)
    assert not [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
