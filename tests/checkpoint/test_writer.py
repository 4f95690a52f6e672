"""Guarantees of writer processes: a failed save leaves no files and the next succeeds; several ranks commit together."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.format.manifest import read_manifest, step_name
from meshwright.checkpoint.memory.record import SnapshotRecord
from meshwright.checkpoint.write import file_writer
from meshwright.checkpoint.write import writer as writing
from meshwright.checkpoint.write.attempt import await_writers
from meshwright.checkpoint.write.writer import Discard, decode, encode
from meshwright.checkpoint.write.writer_process import WriterProcess
from meshwright.launch.folder import take_over
from tests.checkpoint.crash import CALLS, intercept_calls
from tests.checkpoint.toy import newest
from tests.checkpoint.writers import Writers

WRITES = (*CALLS, "pwrite")


def new_writers(run: Path, ranks: int = 1, **options: Any) -> Writers:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    return Writers(run, take_over(run), ranks, **options)


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 3), (errno.EROFS, 2), (errno.EIO, 4)])
def test_a_storage_error_at_any_call_fails_only_that_save(tmp_path: Path, number: int, code: int) -> None:
    writers, calls = new_writers(tmp_path, keep=1000), []
    assert writers.save(1)["event"] == "committed"
    with intercept_calls(lambda k, name, arguments: calls.append(name), WRITES):
        writers.save(2)
    last_commit, failed = 2, 0
    for k in range(len(calls)):

        def refuse(call: int, name: str, arguments: tuple[Any, ...], k: int = k) -> None:
            if call == k:
                raise OSError(number, os.strerror(number))

        step = k + 3
        with intercept_calls(refuse, WRITES):
            reply = writers.save(step)
        if reply["event"] == "committed":  # the call came after the commit
            last_commit = step
        else:
            failed += 1
            assert reply["exit_code"] == code and reply["lease_lost"] is False
            assert reply["message"].startswith(f"saving step {step}: ")
            assert os.strerror(number) in reply["message"]
        assert newest(tmp_path) in (last_commit, step)
    assert failed > 10 and writers.save(1000)["event"] == "committed" and newest(tmp_path) == 1000
    assert not any(name.endswith(".partial") for name in names(tmp_path)), (
        "what could not be removed, the next retention removed"
    )


def test_writers_of_several_ranks_meet_in_the_folder(tmp_path: Path) -> None:
    writers = new_writers(tmp_path, 3)
    assert writers.save(5)["event"] == "committed" and newest(tmp_path) == 5
    manifest = read_manifest(tmp_path / "checkpoints" / step_name(5))
    assert manifest.world_size == 3
    assert set(manifest.files) == {f"tensors-{rank:05d}.safetensors" for rank in range(3)} | {
        "metadata.json",
        "state.json",
    }


def records(writers: Writers) -> list[SnapshotRecord]:
    found = [SnapshotRecord.decode(buffer.read_record() or b"") for buffer in writers.buffers]
    return [record for record in found if record is not None]


def test_a_record_describes_the_replica_in_the_buffer_unless_its_memory_changed(tmp_path: Path) -> None:
    writers = new_writers(tmp_path, 2, replicas=(1, 0))
    assert writers.save(5)["event"] == "committed" and newest(tmp_path) == 5
    both = records(writers)
    assert both[0].state and both[0].contents and not both[1].contents
    for own, other in zip(both, reversed(both), strict=True):
        assert own.replica is not None and own.replica.file is not None and other.file is not None
        assert own.replica == replace(other, replica=None)
    save = writers.stage(6)
    writers.buffers[0].data[writers.buffers[0].size - 1] ^= 1
    assert writers.carry_out(save)["event"] == "committed", "storage gets the rank's own part"
    assert [record.replica is None for record in records(writers)] == [True, False]


def test_a_rank_that_fails_ends_the_save_for_all(tmp_path: Path) -> None:
    writers = new_writers(tmp_path, 3)
    writers.save(1)
    save = writers.stage(2)
    writers.buffers[2].begin_snapshot()  # as if this rank's writer had been stopped and the next snapshot had begun
    assert writers.carry_out(save) == {
        "event": "failed",
        "attempt": save.attempt,
        "exit_code": 3,
        "lease_lost": False,
        "message": "saving step 2: rank 2 could not write its part",
    }
    reply = writers.replies[2].last("failed")
    assert reply is not None and "the snapshot of step 2 is no longer in host memory" in reply["message"]
    writers.buffers[2].complete_snapshot()
    assert names(tmp_path) == {step_name(1)} and newest(tmp_path) == 1


def test_a_rank_that_never_reports_ends_the_save_at_the_deadline(tmp_path: Path) -> None:
    writers = new_writers(tmp_path, 2, peer_seconds=0.2)
    writers.save(1)
    writers.do(0, writers.stage(2))
    reply = writers.replies[0].last("failed")
    assert reply is not None and re.fullmatch(
        r"saving step 2: rank 1 did not write its part within \d+ s", reply["message"]
    )
    assert names(tmp_path) == {step_name(1)}


def test_a_discarded_attempt_is_reported_to_the_first_rank(tmp_path: Path) -> None:
    """Another writer discards the attempt of a writer that was killed."""
    writers = new_writers(tmp_path, 2)
    save = writers.stage(2)
    first = threading.Thread(target=writers.do, args=(0, save))
    first.start()
    while not any(name.endswith(".partial") for name in names(tmp_path)):
        continue
    writers.writers[1].do(Discard(2, save.attempt))
    first.join(60)
    reply = writers.replies[0].last("failed")
    assert reply is not None and "rank 1 could not write its part" in reply["message"] and names(tmp_path) == set()


def test_a_writer_of_an_earlier_start_commits_and_deletes_nothing(tmp_path: Path) -> None:
    earlier_writers = new_writers(tmp_path, keep=1)
    earlier_writers.save(1)
    later_writers = new_writers(tmp_path, keep=2)
    later_writers.save(2)
    reply = earlier_writers.save(3)
    assert reply["lease_lost"] and "was taken over by process" in reply["message"]
    assert names(tmp_path) == {step_name(1), step_name(2)} and newest(tmp_path) == 2


def test_commands_are_equal_after_encoding_and_decoding(tmp_path: Path) -> None:
    save = new_writers(tmp_path).stage(7)
    assert decode(encode(save)) == save and b"\n" not in encode(save)[:-1]


def test_the_writer_imports_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport meshwright.checkpoint.write.writer, meshwright.checkpoint.write.writer_process"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def test_a_start_waits_for_a_writer_that_outlived_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new start continues from the checkpoint that this writer commits."""
    writers = new_writers(tmp_path, keep=5)
    writers.save(1)
    inside, go_on = threading.Event(), threading.Event()
    real = writing.write_file

    def slowly(*arguments: Any, **options: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(writing, "write_file", slowly)
    saving = threading.Thread(target=writers.save, args=(2,))
    saving.start()
    assert inside.wait(60)
    starting = threading.Thread(target=take_over, args=(tmp_path,))
    starting.start()
    starting.join(0.2)
    assert starting.is_alive() and newest(tmp_path) == 1
    go_on.set()
    saving.join(60)
    starting.join(60)
    assert not starting.is_alive() and newest(tmp_path) == 2


def test_a_start_does_not_wait_for_a_writer_that_makes_no_progress(tmp_path: Path) -> None:
    writers = new_writers(tmp_path)
    attempt = writers.writers[0]._attempt(writers.writers[0]._setup, writers.stage(2))  # type: ignore[arg-type]
    attempt.create()
    with attempt.locked():
        began = time.monotonic()
        await_writers(tmp_path / "checkpoints", idle_seconds=0.3)
        assert 0.3 <= time.monotonic() - began < 60
    await_writers(tmp_path / "checkpoints", idle_seconds=60)


@pytest.mark.parametrize("ranks", [1, 2])
def test_host_memory_that_changes_while_it_is_written_is_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """The digest is of what was staged; what is on the disk differs, so the step before is loaded."""
    writers = new_writers(tmp_path, ranks, keep=5)
    writers.save(1)
    real = file_writer._write_at

    def corrupted(descriptor: int, piece: memoryview, offset: int) -> int:
        return real(descriptor, memoryview(bytes([piece[0] ^ 1]) + bytes(piece[1:])), offset)

    monkeypatch.setattr(file_writer, "_write_at", corrupted)
    assert writers.save(2)["event"] == "committed" and newest(tmp_path) == 1


@pytest.mark.parametrize("byte", range(8))
def test_a_snapshot_buffer_whose_header_is_corrupted_before_it_is_written_costs_that_save(
    tmp_path: Path, byte: int
) -> None:
    """The writer finds another generation than the save names; the next snapshot sets a new one."""
    writers = new_writers(tmp_path, 2, keep=5)
    writers.save(1)
    save = writers.stage(2)
    writers.buffers[byte % 2].memory[byte] ^= 0x10
    reply = writers.carry_out(save)
    assert reply["event"] == "failed" and reply["attempt"] == save.attempt
    assert newest(tmp_path) == 1
    writers.buffers[byte % 2].memory[byte] ^= 0x10
    assert writers.save(3)["event"] == "committed" and newest(tmp_path) == 3


def test_a_reply_is_not_lost_behind_heartbeats() -> None:
    """A rank reads nothing between two saves, so that heartbeats fill the pipe."""
    read_end, write_end = os.pipe()
    replies = writing.Replies(write_end)
    for _ in range(10_000):
        replies.beat(phase="idle", written=0)
    sender = threading.Thread(target=replies.send, args=("committed",), kwargs={"step": 7})
    sender.start()
    received = b""
    while b'"committed"' not in received:
        received = received[-100:] + os.read(read_end, 1 << 16)
    sender.join(60)
    assert received.endswith(b'{"event": "committed", "step": 7}\n')
    os.close(read_end)
    replies.send("deleted", step=7)  # a rank that is dead


def test_a_long_message_outside_ascii_is_shortened_to_one_write(tmp_path: Path) -> None:
    """JSON writes such a character in 6 bytes."""
    read_end, write_end = os.pipe()
    writing.Replies(write_end).send("failed", attempt="1-1", message="検" * 2000)
    line = os.read(read_end, 1 << 16)
    reply = json.loads(line)
    assert len(line) <= select.PIPE_BUF
    assert reply["attempt"] == "1-1" and re.fullmatch("検{500,}…", reply["message"])


def test_a_reply_about_an_earlier_attempt_at_the_step_is_not_taken_for_the_save(tmp_path: Path) -> None:
    writers = new_writers(tmp_path, 2)
    save = writers.stage(5)
    setup = writers.writers[1]._setup
    assert setup is not None
    process = WriterProcess(writers.buffers[1], setup)
    process.start()
    process.discard(replace(save, attempt="1-0badbad0"))  # the writer replies that there is no such folder
    first = threading.Thread(target=writers.do, args=(0, save))
    first.start()
    process.save(replace(save, checksums=writers.checksums[1]), committed=lambda reply: None)
    first.join(60)
    process.close()
    assert newest(tmp_path) == 5
