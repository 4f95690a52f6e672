"""Asynchronous saves of one rank with its real writer process: loads return the staged state; a failure loses one save.

A staged state is a step's state, copied to host memory while training goes on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.format.manifest import read_manifest, step_name
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.write import staging
from meshwright.durable.lease import LeaseLost
from meshwright.launch.folder import take_over
from tests.checkpoint.toy import GROUPS, ToyRank, newest


def until(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_snapshots_are_committed_and_old_ones_deleted(tmp_path: Path) -> None:
    rank = ToyRank(tmp_path, keep=2)
    for step in (10, 20, 30):
        result = rank.save(step)
        assert result.failure is None and result.path == tmp_path / "checkpoints" / step_name(step)
        assert result.seconds is not None and set(result.seconds) == {"staging", "writing", "waiting", "commit"}
        assert 0 < result.seconds["staging"] < 10
        assert newest(tmp_path) == step
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {step_name(20), step_name(30)}
    manifest = read_manifest(result.path)
    assert (manifest.run_id, manifest.epoch, manifest.world_size) == (rank.lease.run_id, 1, 1)
    assert (manifest.finite, manifest.parent, manifest.seconds is None) == (True, None, False)
    assert rank.saver.writer is not None and rank.saver.writer.starts == 1


def test_a_file_is_that_of_a_synchronous_save(tmp_path: Path) -> None:
    """Also one of several blocks, whose digests several threads take."""
    rank = ToyRank(tmp_path / "async", scale=4000)
    path = rank.save(7).path
    assert path is not None
    rank.update(7)
    sync = CheckpointStore(tmp_path / "sync").save(7, rank.tensors, {"step": 7}, {}).path
    names = {"tensors-00000.safetensors", "metadata.json", "state.json"}
    assert {name: (path / name).read_bytes() == (sync / name).read_bytes() for name in names} == dict.fromkeys(
        names, True
    )
    asynchronous, synchronous = read_manifest(path), read_manifest(sync)
    assert asynchronous.files == synchronous.files and len(asynchronous.files["tensors-00000.safetensors"].blocks) > 2


@pytest.mark.parametrize("buffered", [0, 1, len(GROUPS)])
def test_no_update_reaches_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffered: int) -> None:
    """The update of the next step runs before and after the copy of every piece, also if groups are first copied to a buffer."""
    rank = ToyRank(tmp_path, keep=100)
    rank.saver.agree_on_readiness()
    assert rank.saver.stager is not None
    rank.saver.stager.from_host.buffer_first_groups(buffered)
    in_buffers = sum(name.rpartition(".")[2] in group for name in rank.tensors for group in GROUPS[:buffered])
    assert rank.saver.stager.from_host.buffered_bytes == 4 * sum(
        tensor.numel()
        for name, tensor in rank.tensors.items()
        for group in GROUPS[:buffered]
        if name.rpartition(".")[2] in group
    )
    copied_tensors = len(rank.tensors) + in_buffers
    copy, stop_at, reached, go_on = staging._copy, [0], threading.Event(), threading.Event()
    count = [0]

    def gated(target: torch.Tensor, source: torch.Tensor) -> None:
        if count[0] == stop_at[0]:
            reached.set()
            assert go_on.wait(60)
        copy(target, source)
        count[0] += 1

    monkeypatch.setattr(staging, "_copy", gated)
    for k in range(copied_tensors + 1):
        stop_at[0], count[0] = k, 0
        reached.clear()
        go_on.clear()
        rank.update(k)
        updating = threading.Thread(target=rank.begin, args=(k,))
        updating.start()
        if k < copied_tensors:
            assert reached.wait(60)
            time.sleep(0.01)  # the update goes as far as it may
        go_on.set()
        updating.join(60)
        assert rank.saver.wait(60) and newest(tmp_path) == k
        for name, tensor in rank.tensors.items():
            at_snapshot = tensor.clone()
            rank.update_one(name, k + 1)
            assert torch.equal(at_snapshot, tensor), "the update is complete too"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_writer_that_is_killed_or_stopped_costs_one_save(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = ToyRank(tmp_path)
    assert rank.save(1).failure is None
    writer = rank.saver.writer
    assert writer is not None and writer.pid is not None
    os.kill(writer.pid, number)
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    with monkeypatch.context() as short:
        if number == signal.SIGSTOP:
            short.setattr(writer, "_silent", 1.0)
        failure = rank.save(2).failure
    if number == signal.SIGSTOP:
        assert failure is not None and "saving step 2: the writer sent no heartbeat for 1 s" in str(failure)
        until(lambda: {path.name for path in (tmp_path / "checkpoints").iterdir()} == {step_name(1)})
    else:
        assert failure is None, "it was replaced before the save"
    assert writer.starts == 2 and newest(tmp_path) == (1 if failure else 2)
    assert rank.save(3).failure is None and newest(tmp_path) == 3


def test_a_writer_killed_in_a_save_costs_that_save(tmp_path: Path) -> None:
    rank = ToyRank(tmp_path, scale=8000)
    assert rank.save(1).failure is None
    writer = rank.saver.writer
    assert writer is not None and writer.pid is not None
    rank.update(2)
    rank.begin(2)
    until(lambda: any(path.name.startswith(".step-00000002") for path in (tmp_path / "checkpoints").iterdir()))
    os.kill(writer.pid, signal.SIGKILL)
    assert rank.saver.wait(60)
    result = rank.saver.result()
    assert result is not None and "the writer was ended by signal 9; another writer was started" in str(result.failure)
    until(lambda: {path.name for path in (tmp_path / "checkpoints").iterdir()} == {step_name(1)})
    assert rank.save(3).failure is None and newest(tmp_path, 8000) == 3


def test_a_writer_woken_after_another_start_took_over_commits_nothing(tmp_path: Path) -> None:
    rank = ToyRank(tmp_path)
    assert rank.save(1).failure is None
    writer = rank.saver.writer
    assert writer is not None and writer.pid is not None
    os.kill(writer.pid, signal.SIGSTOP)
    rank.update(2)
    rank.begin(2)
    take_over(tmp_path)
    os.kill(writer.pid, signal.SIGCONT)
    assert rank.saver.wait(60)
    result = rank.saver.result()
    assert (
        result is not None
        and isinstance(result.failure, LeaseLost)
        and "was taken over by process" in str(result.failure)
    )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [step_name(1)]


def test_a_save_without_its_description_is_not_committed(tmp_path: Path) -> None:
    """The loss of its step was not finite, or the run ended before it was read."""
    rank = ToyRank(tmp_path)
    assert rank.save(1).failure is None
    rank.update(2)
    rank.saver.begin(2)
    assert not rank.saver.wait(0.3) and rank.saver.in_flight
    rank.saver.describe(3, dict)
    assert not rank.saver.wait(0.1)
    rank.update(3)
    rank.begin(3)
    assert rank.saver.wait(60) and newest(tmp_path) == 3
    assert step_name(2) not in {path.name for path in (tmp_path / "checkpoints").iterdir()}


def test_a_long_folder_name_outside_ascii_costs_neither_a_save_nor_the_writer(tmp_path: Path) -> None:
    """The texts of replies are longer than one write to a pipe."""
    run = tmp_path.joinpath(*["検" * 80] * 10)
    rank = ToyRank(run)
    result = rank.save(1)
    assert result.failure is None and result.path == run / "checkpoints" / step_name(1)
    moved = run.with_name("moved")
    run.rename(moved)
    assert str(rank.save(2).failure).startswith(f"saving step 2: {tmp_path}")
    moved.rename(run)
    assert rank.save(3).failure is None and newest(run) == 3
    assert rank.saver.writer is not None and rank.saver.writer.starts == 1


@pytest.mark.parametrize("position", [0, 37, -1])
def test_a_snapshot_buffer_that_changes_behind_the_copies_fails_that_save(tmp_path: Path, position: int) -> None:
    """One bit flips after staging and before the writer process reads the snapshot buffer: nothing is committed, and training goes on."""
    rank = ToyRank(tmp_path, scale=400)
    assert rank.save(1).failure is None
    rank.update(2)
    rank.saver.begin(2).join()
    buffer = rank.saver._buffer
    assert buffer is not None
    buffer.data[position] ^= 16
    rank.saver.describe(2, dict)
    assert rank.saver.wait(60)
    result = rank.saver.result()
    assert result is not None and "changed in host memory after it was copied there" in str(result.failure)
    assert buffer.read_record() is None, "the memory tier does not offer it either"
    assert newest(tmp_path, 400) == 1
    assert rank.save(3).failure is None and newest(tmp_path, 400) == 3
    assert rank.saver.writer is not None and rank.saver.writer.starts == 1
