"""What `meshwright train` says of saves beside training, and what it does where host memory does not hold a snapshot."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from meshwright.checkpoint.verify import list_checkpoints
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
    with mock.patch("meshwright.checkpoint.background.available_host_memory", lambda: 1000):
        answer = train_here(tiny, *WORDS, "--runs", tmp_path)
    assert answer.code == 0 and steps(tmp_path / "tiny") == [3, 6]
    assert (
        "checkpoints are written while training waits: 0.0 GB of arenas on a host with 0.0 GB of memory left"
        in answer.out
    )
    assert "beside training" not in answer.out


def test_training_waits_where_the_arena_cannot_be_made(tiny: Path, tmp_path: Path) -> None:
    """The first save finds out, on all ranks."""
    with mock.patch("meshwright.checkpoint.arena.os.memfd_create", side_effect=OSError(28, "No space left on device")):
        answer = train_here(tiny, *WORDS, "--runs", tmp_path)
    assert answer.code == 0 and steps(tmp_path / "tiny") == [3, 6]
    assert "checkpoints are written while training waits: " in answer.out and "No space left on device" in answer.out
