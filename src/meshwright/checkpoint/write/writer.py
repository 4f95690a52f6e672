"""The writer process of a rank: it writes snapshots from the rank's snapshot buffer to storage and commits them.

`python -m meshwright.checkpoint.write.writer BUFFER_DESCRIPTOR` reads commands (`WriterSetup`, `Save`, `Discard`) from its
standard input, and writes replies to its standard output, one JSON object per line. It imports no torch, has its own
session, and ignores stop signals. When its rank dies, its input ends. It then carries out the commands that it has
received and exits.

The writers of all ranks share the attempt's folder on the run's storage. Each writer makes its file durable, and then
publishes `rank-NNNNN.done` with the file's record, or `rank-NNNNN.failed`. The first rank's writer waits for these files
with a deadline, removes them, and commits as `checkpoint.write.attempt` describes. There is no socket and no process
group.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint.format.contents import Contents, contents_of
from meshwright.checkpoint.format.digests import block_digest
from meshwright.checkpoint.format.files import FileRecord
from meshwright.checkpoint.format.header import TensorHeader
from meshwright.checkpoint.format.manifest import STATE, tensor_file
from meshwright.checkpoint.memory.file_image import FileImage
from meshwright.checkpoint.memory.partner_copy import Partner, PartnerCopier
from meshwright.checkpoint.memory.record import SnapshotName, SnapshotRecord
from meshwright.checkpoint.memory.snapshot_buffer import SnapshotBuffer
from meshwright.checkpoint.write.attempt import Provenance, SaveAttempt, delete_beyond, recover, remove_stale
from meshwright.checkpoint.write.checksum import BufferChecksums
from meshwright.checkpoint.write.file_writer import write_file
from meshwright.durable.lease import LeaseLost
from meshwright.durable.writes import write_durable
from meshwright.spec.errors import BadInput, Damaged, MeshwrightError, OutOfResources
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.run import Lease

log = logging.getLogger("meshwright")

NICENESS = 5
"""Added to the niceness of the writer, so that training's threads run first on a host with few cores."""
BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""
REPLY_SECONDS = 10.0
"""Seconds that a reply waits for space in the pipe. The process that reads the pipe may be stopped."""
MESSAGE_LIMIT = 2000
"""At most this many characters of a failure's message are sent to the rank."""
ORPHAN_SECONDS = 600.0
"""Seconds after which a writer whose rank is dead gives up."""
FOLDER_SECONDS = 120.0
"""Seconds that a writer waits for the first rank's writer to create the attempt's folder."""
PEER_SECONDS = 600.0
"""Least seconds that the first rank's writer waits for the other ranks' files after its own is durable."""
POLL_SECONDS = (0.01, 0.5)
"""First and longest seconds between two looks at the attempt's folder."""


@dataclass(frozen=True)
class WriterSetup:
    """Settings of the writer, the same for all saves of one start of the run.

    `folder`: the folder of the run's checkpoints.
    `rank`, `ranks`: this rank, and the number of ranks.
    `headers`: (key, dtype, shape) of the tensors in the snapshot buffer.
    `contents`: the checkpoint's contents; only on the first rank, and on the rank that also has its snapshot.
    `lease`: the run's lease, or None. `parent`: the step from which this start continued, or None.
    `keep`: how many checkpoints are kept. `threads`: threads that write.
    `peer_seconds`, `folder_seconds`: see PEER_SECONDS and FOLDER_SECONDS.
    """

    folder: str
    rank: int
    ranks: int
    headers: list[Any]
    contents: dict[str, Any]
    lease: dict[str, Any] | None
    keep: int
    threads: int
    torch_version: str
    parent: int | None = None
    peer_seconds: float = PEER_SECONDS
    folder_seconds: float = FOLDER_SECONDS
    partner: dict[str, Any] | None = None
    """Where copies of the snapshots are sent (`partner_copy.Partner`); None: nowhere."""
    replica: int | None = None
    """A rank on another host whose snapshot follows in the snapshot buffer, with the headers `replica_headers`; or None."""
    replica_headers: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Save:
    """The command to write the snapshot of `step` that the snapshot buffer has at `generation`.

    `attempt` names the save. `staging_seconds` is how long the copy into the buffer took, and `finite` whether the step's
    loss and gradient norm were finite. `plain` has the first rank's other files by name. On the rank that also has the
    first rank's snapshot it has `state.json`.
    """

    step: int
    attempt: str
    generation: int
    staging_seconds: float
    finite: bool | None = None
    urgent: bool = False
    """Whether the run waits for the save. Otherwise only half of the threads write, to leave processors to training."""
    to_partner: bool = False
    """Whether the partner gets a copy of the snapshot."""
    checksums: list[list[int]] = field(default_factory=list)
    """(phase, sum) of each tensor in the snapshot buffer, computed before the copy (`checkpoint.write.checksum`)."""
    plain: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Discard:
    """The command after the save `attempt` has failed on this rank.

    The first rank's writer removes the attempt's folder. Any other writer tells the first rank's writer.
    """

    step: int
    attempt: str


Command = WriterSetup | Save | Discard
_COMMANDS: dict[str, type[Command]] = {command.__name__: command for command in (WriterSetup, Save, Discard)}


def encode(command: Command) -> bytes:
    """Return the line that sends a command."""
    return json.dumps({"command": type(command).__name__, **asdict(command)}).encode() + b"\n"


def decode(line: bytes) -> Command:
    """Return the command that a line has."""
    fields = json.loads(line)
    return _COMMANDS[fields.pop("command")](**fields)


class Replies:
    """Sends replies from the writer to its rank through a pipe.

    If the pipe has no space, a heartbeat is dropped at once, and a reply after a while.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        os.set_blocking(descriptor, False)

    def send(self, event: str, **fields: Any) -> None:
        """Send a reply. Waits up to `REPLY_SECONDS` for space, because heartbeats fill the pipe if the rank reads nothing."""
        self._write(event, fields, REPLY_SECONDS)

    def beat(self, **fields: Any) -> None:
        """Send a heartbeat, if there is space."""
        self._write("beat", fields, 0.0)

    def _write(self, event: str, fields: dict[str, Any], seconds: float) -> None:
        line = json.dumps({"event": event, **fields}).encode() + b"\n"
        assert len(line) <= select.PIPE_BUF, "a pipe takes a line of this length whole or not at all"
        with self._lock, suppress(BlockingIOError, BrokenPipeError):
            select.select([], [self._descriptor], [], seconds)
            os.write(self._descriptor, line)


class Writer:
    """Carries out the commands of one rank. `reply` is `Replies.send`."""

    def __init__(self, buffer: SnapshotBuffer, reply: Callable[..., None]) -> None:
        self._buffer = buffer
        self._reply = reply
        self._setup: WriterSetup | None = None
        self._contents: Contents = {}
        self._copier: PartnerCopier | None = None
        self._recording = threading.Lock()
        self.written = 0
        """Bytes written to storage so far."""
        self.phase = "idle"
        """What the writer does now: "idle", "writing", "waiting", "committing" or "deleting"."""

    def do(self, command: Command) -> None:
        """Carry out a command. A failure is sent as a reply and not raised."""
        if isinstance(command, WriterSetup):
            self._setup = command
            self._contents = contents_of(command.contents)
            if command.partner is not None:
                self._copier = PartnerCopier(self._buffer, Partner(**command.partner), self._copied)
            return
        assert self._setup is not None, "WriterSetup comes first"
        try:
            self._discard(self._setup, command) if isinstance(command, Discard) else self._save(self._setup, command)
        except Exception as error:
            failure = as_meshwright_error(error, f"saving step {command.step}")
            with suppress(OSError, MeshwrightError):
                self._discard(self._setup, Discard(command.step, command.attempt))
            self._reply(
                "failed",
                step=command.step,
                message=str(failure)[:MESSAGE_LIMIT],
                exit_code=failure.exit_code,
                lease_lost=isinstance(error, LeaseLost),
            )
        finally:
            self.phase = "idle"

    def _save(self, setup: WriterSetup, save: Save) -> None:
        """Write this rank's part of a save. The first rank's writer also commits the checkpoint and deletes old ones."""
        attempt = self._attempt(setup, save)
        attempt.check_owner()  # without the lease the folder would never appear, and this writer would wait for it
        self._buffer.begin_saving(save.generation)
        if self._copier is not None and save.to_partner:
            self._copy_to_partner(self._copier, setup, save)
        self.phase = "writing"
        if setup.rank:
            began = time.perf_counter()
            _wait_for_folder(attempt, setup.folder_seconds)
            files = self._write(setup, save, attempt.folder)
            entries = {name: asdict(record) for name, record in files.items()}
            write_durable(attempt.folder / done_name(setup.rank), json.dumps(entries))
            self._reply("done", step=save.step, seconds=time.perf_counter() - began)
            return
        recover(attempt.checkpoints)
        attempt.create()
        with attempt.locked():
            self._write_and_commit(setup, save, attempt)
        self.phase = "deleting"
        try:
            attempt.check_owner()
            delete_beyond(attempt.checkpoints, setup.keep, attempt.target)
            remove_stale(attempt.checkpoints, None if attempt.lease is None else attempt.lease.epoch)
        except (OSError, MeshwrightError) as error:
            log.warning("old checkpoints were not deleted: %s", as_meshwright_error(error))
        self._reply("deleted", step=save.step)

    def _write_and_commit(self, setup: WriterSetup, save: Save, attempt: SaveAttempt) -> None:
        """Write the first rank's file, wait for the other ranks' files, and commit the checkpoint."""
        # Start of the write, its end, and the end of the wait for other ranks.
        times = [time.perf_counter()]
        files = self._write(setup, save, attempt.folder)
        times.append(time.perf_counter())
        self.phase = "waiting"
        files |= peer_files(attempt, setup.ranks, max(setup.peer_seconds, 10 * (times[1] - times[0])))
        times.append(time.perf_counter())
        self.phase = "committing"
        plain = {name: text.encode() for name, text in save.plain.items()}
        seconds = {"staging": save.staging_seconds, "writing": times[1] - times[0], "waiting": times[2] - times[1]}
        provenance = Provenance(setup.ranks, setup.torch_version, setup.parent, save.finite, seconds)
        size = attempt.commit(files, self._contents, plain, provenance).total_bytes
        seconds = {**seconds, "commit": time.perf_counter() - times[2]}
        self._reply("committed", step=save.step, path=str(attempt.target), bytes=size, seconds=seconds)

    def _write(self, setup: WriterSetup, save: Save, folder: Path) -> dict[str, FileRecord]:
        """Write the rank's file into `folder`, and read the replica's snapshot at the same time. Return the file's record by name."""
        with ThreadPoolExecutor(1) as beside:
            replica = beside.submit(self._describe_replica, setup, save)
            return self._write_own(setup, save, folder, replica.result)

    def _write_own(
        self, setup: WriterSetup, save: Save, folder: Path, replica: Callable[[], SnapshotRecord | None]
    ) -> dict[str, FileRecord]:
        """Write the rank's file, and store its record in the snapshot buffer, with `replica()` as the replica's record."""
        if not setup.headers:
            self._record(setup, save, None, replica())
            return {}
        self._check_generation(save)
        name = tensor_file(setup.rank)
        image = FileImage(setup.headers, self._buffer.data)
        threads = setup.threads if save.urgent else -(-setup.threads // 2)
        checksums = _checksums(setup.headers, save.checksums[: len(setup.headers)])

        def compare(offset: int, piece: memoryview) -> None:
            if offset >= len(image.header):
                checksums.add(offset - len(image.header), piece)

        def complete(record: FileRecord) -> None:
            checksums.check()
            self._record(setup, save, record, replica())

        window = [image.header, image.data]
        record = write_file(folder / name, [window], threads, progress=self._count, inspect=compare, digested=complete)
        self._check_generation(save)
        return {name: record}

    def _copy_to_partner(self, copier: PartnerCopier, setup: WriterSetup, save: Save) -> None:
        """Begin to copy the snapshot to the partner, with a comparison of its checksums."""
        checksums = _checksums(setup.headers, save.checksums)

        def describe(file: FileRecord | None) -> bytes:
            checksums.check()
            return self._record(setup, save, file, None)

        image = FileImage(setup.headers, self._buffer.data)
        copier.start(_name(setup, save), image, save.generation, describe, checksums.add)

    def _describe_replica(self, setup: WriterSetup, save: Save) -> SnapshotRecord | None:
        """Return the record of the replica's snapshot in the snapshot buffer.

        Returns None if there is no replica, or if its data are not the state that was copied.
        """
        if setup.replica is None:
            return None
        own = len(setup.headers)
        checksums = _checksums(setup.replica_headers, save.checksums[own:])
        image = FileImage(setup.replica_headers, self._buffer.data[sum(_sizes(setup.headers)) :])
        digests = []
        for index in range(image.blocks):
            block = image.block(index)
            digests.append(block_digest(block))
            checksums.add(*image.data_of_block(index))
            self._buffer.count_saved(len(block))  # so that a start of the run that waits for the record sees progress
        try:
            checksums.check()
        except Damaged as error:
            log.warning("step %d has no second copy in host memory: %s", save.step, error)
            return None
        file = FileRecord(image.bytes, tuple(digests)) if digests else None
        return _snapshot_record(setup, save, setup.replica, setup.replica_headers, file)

    def _record(self, setup: WriterSetup, save: Save, file: FileRecord | None, replica: SnapshotRecord | None) -> bytes:
        """Store in the snapshot buffer, and return, the record with which another process can load its snapshots."""
        own = _snapshot_record(setup, save, setup.rank, setup.headers, file)
        record = replace(own, replica=replica).encode()
        with self._recording:
            self._check_generation(save)
            self._buffer.write_record(record, save.generation)
        return record

    def _copied(self, step: int, seconds: float) -> None:
        self._reply("copied", step=step, seconds=seconds)

    def _count(self, written: int) -> None:
        self.written += written
        self._buffer.count_saved(written)

    def _check_generation(self, save: Save) -> None:
        """Raise Damaged unless the buffer still has the snapshot. A stopped writer may continue during the next copy."""
        if self._buffer.generation != save.generation:
            raise Damaged(f"the snapshot of step {save.step} is no longer in host memory; this writer was stopped")

    def _discard(self, setup: WriterSetup, command: Discard) -> None:
        attempt = self._attempt(setup, command)
        if setup.rank == 0:
            attempt.abandon()
        else:
            (attempt.folder / failed_name(setup.rank)).touch()

    def _attempt(self, setup: WriterSetup, command: Save | Discard) -> SaveAttempt:
        lease = None if setup.lease is None else Lease(**setup.lease)
        return SaveAttempt(Path(setup.folder), command.step, command.attempt, lease)


def _checksums(headers: Sequence[Any], expected: Sequence[Sequence[int]]) -> BufferChecksums:
    """Return an object that compares the data of a snapshot with the checksums of the state."""
    return BufferChecksums([key for key, _, _ in headers], _sizes(headers), expected)


def _sizes(headers: Sequence[Any]) -> list[int]:
    return [TensorHeader(key, dtype, tuple(shape)).bytes for key, dtype, shape in headers]


def _name(setup: WriterSetup, save: Save) -> SnapshotName:
    run_id = None if setup.lease is None else setup.lease["run_id"]
    return SnapshotName(run_id, save.attempt, save.step, setup.rank, setup.ranks)


def _snapshot_record(
    setup: WriterSetup, save: Save, rank: int, headers: list[Any], file: FileRecord | None
) -> SnapshotRecord:
    """Return the record of the snapshot of `rank`, which is this rank or its replica."""
    contents, state = ({}, None) if rank else (setup.contents, save.plain.get(STATE))
    name = replace(_name(setup, save), rank=rank)
    return SnapshotRecord(**asdict(name), headers=headers, file=file, contents=contents, state=state)


def done_name(rank: int) -> str:
    """Return the name of the file that a rank's writer publishes when its part is durable."""
    return f"rank-{rank:05d}.done"


def failed_name(rank: int) -> str:
    """Return the name of the file that a rank's writer publishes when its part has failed."""
    return f"rank-{rank:05d}.failed"


def peer_files(attempt: SaveAttempt, ranks: int, seconds: float) -> dict[str, FileRecord]:
    """Wait until the files of all ranks but the first are durable. Return their records, and remove the `done` files.

    Raises OutOfResources if a rank reports a failure, or has not reported within `seconds`.
    """
    missing = set(range(1, ranks))
    files = {}
    deadline = time.monotonic() + seconds
    pause = POLL_SECONDS[0]
    while missing:
        names = set(os.listdir(attempt.folder))
        for rank in sorted(missing):
            if failed_name(rank) in names:
                raise OutOfResources(f"rank {rank} could not write its part")
            if done_name(rank) in names:
                done = attempt.folder / done_name(rank)
                entries = json.loads(done.read_bytes())
                files |= {name: FileRecord.from_plain(entry) for name, entry in entries.items()}
                done.unlink()
                missing.discard(rank)
        if missing and time.monotonic() > deadline:
            raise OutOfResources(f"rank {min(missing)} did not write its part within {seconds:.0f} s")
        if missing:
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])
    return files


def _wait_for_folder(attempt: SaveAttempt, seconds: float) -> None:
    """Wait until the first rank's writer has created the attempt's folder. Raises BadInput after `seconds`."""
    deadline = time.monotonic() + seconds
    pause = POLL_SECONDS[0]
    while not attempt.folder.is_dir():
        if time.monotonic() > deadline:
            attempt.check_owner()
            raise BadInput(
                f"{attempt.folder} did not appear within {seconds:.0f} s; the run folder must be on storage that all hosts share"
            )
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS[1])


class _Warnings(logging.Handler):
    """Sends warnings to the rank, which logs them."""

    def __init__(self, replies: Replies) -> None:
        super().__init__(logging.WARNING)
        self._replies = replies

    def emit(self, record: logging.LogRecord) -> None:
        self._replies.send("warning", message=record.getMessage()[:MESSAGE_LIMIT])


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    replies = Replies(1)
    logging.getLogger("meshwright").handlers[:] = [_Warnings(replies)]
    writer = Writer(SnapshotBuffer.inherited(int(sys.argv[1])), replies.send)
    commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(commands,), daemon=True).start()
    threading.Thread(target=_beat, args=(writer, replies), daemon=True).start()
    while (command := commands.get()) is not None:
        writer.do(command)


def _read_commands(commands: queue.SimpleQueue[Command | None]) -> None:
    with open(0, "rb", closefd=False) as lines:
        for line in lines:
            if line.endswith(b"\n"):
                commands.put(decode(line))
    commands.put(None)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)


def _beat(writer: Writer, replies: Replies) -> None:
    while True:
        replies.beat(phase=writer.phase, written=writer.written)
        time.sleep(BEAT_SECONDS)


if __name__ == "__main__":
    main()
