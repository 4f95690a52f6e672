"""Messages of `meshwright train` about asynchronous saves, and its fallback if host memory cannot hold a snapshot."""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

from meshwright.checkpoint.format.verify import list_checkpoints
from meshwright.checkpoint.write.staging import PinnedSnapshotBuffer
from tests.cli.command import train_here
from tests.cli.conftest import ONE_RANK

WORDS = (ONE_RANK, "checkpoint.every=3", "checkpoint.mode=async")


def steps(run: Path) -> list[int]:
    return [entry["step"] for entry in list_checkpoints(run) if entry["ok"]]


def test_checkpoints_are_written_beside_training(tiny: Path, tmp_path: Path) -> None:
    answer = train_here(tiny, *WORDS, "--runs", tmp_path)
    assert answer.code == 0 and steps(tmp_path / "tiny") == [3, 6]
    assert "checkpoints are written beside training, from 0.00 GB of host memory a rank" in answer.out
    assert answer.out.count("beside training (seconds: staging") == 2


def test_training_waits_where_host_memory_does_not_hold_a_snapshot(tiny: Path, tmp_path: Path) -> None:
    with (
        mock.patch("meshwright.checkpoint.write.background.available_host_memory", lambda: 1000),
        mock.patch("meshwright.training.saving.ASYNC_BYTES", 0),
    ):
        answer = train_here(tiny, *WORDS, "checkpoint.mode=auto", "--runs", tmp_path)
        refused = train_here(tiny, *WORDS, "name=refused", "--runs", tmp_path)
    assert answer.code == 0 and steps(tmp_path / "tiny") == [3, 6]
    reason = "0.0 GB of snapshot buffers on a host with 0.0 GB of memory left"
    assert (
        f"checkpoints are written while training waits: {reason}" in answer.out and "beside training" not in answer.out
    )
    assert (
        refused.code == 3 and f"checkpoint.mode is async: {reason}" in refused.err and not steps(tmp_path / "refused")
    )


def test_training_waits_where_the_buffer_cannot_be_made(tiny: Path, tmp_path: Path) -> None:
    """The first save finds out, on all ranks."""
    with (
        mock.patch(
            "meshwright.checkpoint.memory.snapshot_buffer.empty_memory",
            side_effect=OSError(28, "No space left on device"),
        ),
        mock.patch("meshwright.training.saving.ASYNC_BYTES", 0),
    ):
        answer = train_here(tiny, *WORDS, "checkpoint.mode=auto", "--runs", tmp_path)
        refused = train_here(tiny, *WORDS, "name=refused", "--runs", tmp_path)
    assert answer.code == 0 and steps(tmp_path / "tiny") == [3, 6]
    assert "checkpoints are written while training waits: " in answer.out and "No space left on device" in answer.out
    assert refused.code == 3 and "No space left on device" in refused.err and not steps(tmp_path / "refused")


def test_a_save_that_is_due_before_the_buffer_is_ready_begins_later(tiny: Path, tmp_path: Path) -> None:
    """No step waits for the preparation; the last one does."""
    prepare = PinnedSnapshotBuffer.prepare

    def slowly(buffer: PinnedSnapshotBuffer) -> None:
        time.sleep(0.5)
        prepare(buffer)

    with (
        mock.patch.object(PinnedSnapshotBuffer, "prepare", slowly),
        mock.patch("meshwright.checkpoint.write.background.ASYNC_BYTES", 0),
    ):
        answer = train_here(
            tiny, *WORDS, "train.steps=120", "checkpoint.every=50", "checkpoint.keep=9", "--runs", tmp_path
        )
    saved = steps(tmp_path / "tiny")
    assert answer.code == 0 and saved[0] >= 50 and saved[-1] == 120
    assert "beside training (seconds" in answer.out
