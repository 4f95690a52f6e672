"""Cases of the memory tier: ranks train with snapshot buffers that outlive them, and start again in the same process."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from meshwright.checkpoint.format.header import read_entries
from meshwright.checkpoint.format.inventory import FIRST_COMMIT
from meshwright.checkpoint.memory.snapshot_buffer import BUFFER_VARIABLE, SnapshotBuffer, empty_memory
from meshwright.checkpoint.memory.snapshots import SnapshotMemory, open_snapshot
from meshwright.checkpoint.memory.transport import SERVER_VARIABLE, SnapshotServer
from meshwright.checkpoint.ranks import RankGroup
from meshwright.observe.metrics import MetricsWriter
from meshwright.parallel.world import World
from meshwright.spec.job_token import TOKEN_VARIABLE
from meshwright.spec.run import Assignment
from meshwright.training.loop import train
from meshwright.training.reporting import Reporter
from meshwright.training.saving import Saver
from meshwright.training.session import TrainingSession, open_session
from meshwright.training.stop import StopRequest

Change = Callable[[World, TrainingSession], None]
Start = tuple[str | None, int, bool]
"""(tier, step, equal) of a start; `equal` tells whether all state has the trained bits, or at step 0 the initial ones."""
TOKEN = "0123456789abcdef"


def nothing(world: World, session: TrainingSession) -> None:
    """The snapshot buffers stay as they are."""


def delete_checkpoints(world: World, session: TrainingSession) -> None:
    """Storage has no checkpoint."""
    if world.leads:
        shutil.rmtree(session.folder / "checkpoints")
        (session.folder / "checkpoints").mkdir()
        for name in (FIRST_COMMIT, "metrics.jsonl"):  # as of a run that never saved
            (session.folder / name).unlink(missing_ok=True)


def corrupt_byte(world: World, session: TrainingSession) -> None:
    """One byte of the last rank's snapshot buffer changes."""
    if world.rank == world.ranks - 1:
        buffer = _buffer()
        buffer.data[buffer.size // 2] ^= 4


def corrupt_record(world: World, session: TrainingSession) -> None:
    """One byte of the last rank's record changes."""
    if world.rank == world.ranks - 1:
        buffer = _buffer()
        offset = os.fstat(buffer.descriptor).st_size - 9
        os.pwrite(buffer.descriptor, bytes([os.pread(buffer.descriptor, 1, offset)[0] ^ 1]), offset)


def begin_next_snapshot(world: World, session: TrainingSession) -> None:
    """One rank has begun to copy the next snapshot."""
    if world.rank == 0:
        _buffer().begin_snapshot()


def lose_buffer(world: World, session: TrainingSession) -> None:
    """The last rank's host was replaced."""
    if world.rank == world.ranks - 1:
        os.environ[BUFFER_VARIABLE] = f"/proc/self/fd/{empty_memory()}"


def corrupt_and_delete(world: World, session: TrainingSession) -> None:
    corrupt_byte(world, session)
    delete_checkpoints(world, session)


def exchange_buffers(world: World, session: TrainingSession) -> None:
    """Hosts change places: each rank finds the snapshot buffer of the next one."""
    ranks, path = RankGroup(world.control), os.environ[BUFFER_VARIABLE].replace("self", str(os.getpid()))
    paths = ranks.run_on_all("exchanging", lambda: path)
    os.environ[BUFFER_VARIABLE] = paths[(world.rank + 1) % world.ranks]
    delete_checkpoints(world, session)


def _buffer() -> SnapshotBuffer:
    buffer = SnapshotBuffer.of_last_process()
    assert buffer is not None
    return buffer


def restarted(world: World, assignment: Assignment, starts: Sequence[tuple[Change, int | None]]) -> list[Start]:
    """Train once; of each (change, newest step to resume from), start from what the run left, after the change.

    Each start has copies of the snapshot buffers and of the checkpoints.
    """
    with mock.patch.dict(os.environ, {BUFFER_VARIABLE: f"/proc/self/fd/{empty_memory()}"}):
        session = open_session(assignment, world)
        initial = {name: parts.read().clone() for name, parts in session.state().items()}
        _train(session)
        trained = {name: parts.read().clone() for name, parts in session.state().items()}
        RankGroup(world.control).run_on_all("training", lambda: None)
        memory = Path(os.environ[BUFFER_VARIABLE]).read_bytes()
    if world.leads:
        (session.folder / "checkpoints").rename(session.folder.parent / "stored")
    results: list[Start] = []
    for change, at_most in starts:
        resumed = _start_after(change, world, session, memory, _resume_assignment(assignment, at_most))
        expected = trained if resumed.step else initial
        equal = all(torch.equal(parts.read(), expected[name]) for name, parts in resumed.state().items())
        results.append((resumed.resumed_from, resumed.step, equal))
    return results


def _start_after(
    change: Change, world: World, session: TrainingSession, memory: bytes, assignment: Assignment
) -> TrainingSession:
    """The start of `assignment` after a `change` to copies of this rank's `memory` and of the stored checkpoints."""
    ranks, descriptor = RankGroup(world.control), empty_memory()
    os.write(descriptor, memory)
    if world.leads:
        shutil.rmtree(session.folder / "checkpoints", ignore_errors=True)
        shutil.copytree(session.folder.parent / "stored", session.folder / "checkpoints")
    with mock.patch.dict(os.environ, {BUFFER_VARIABLE: f"/proc/self/fd/{descriptor}"}):
        ranks.run_on_all("copying", lambda: None)
        change(world, session)
        ranks.run_on_all("changing", lambda: None)
        resumed = open_session(assignment, world)
        ranks.run_on_all("loading", lambda: None)
    os.close(descriptor)
    return resumed


class Host:
    """One rank as a host: the memory that its agent keeps, and its snapshot server, in a thread."""

    def __init__(self) -> None:
        self.buffer = f"/proc/self/fd/{empty_memory()}"
        self.slots = [f"/proc/self/fd/{empty_memory()}" for _ in range(2)]
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        pid = os.getpid()
        paths = [path.replace("self", str(pid)) for path in (self.buffer, *self.slots)]
        server = SnapshotServer(self.listener, TOKEN, SnapshotMemory(paths[:1], paths[1:]))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(server,))
        self._thread.start()

    def _serve(self, server: SnapshotServer) -> None:
        while not self._ended.is_set():
            server.serve(0.05)

    def environment(self, token: Path) -> dict[str, str]:
        return {BUFFER_VARIABLE: self.buffer, SERVER_VARIABLE: self.address, TOKEN_VARIABLE: str(token)}

    def slot_buffer(self) -> SnapshotBuffer:
        """The slot that has a copy."""
        snapshot = next(filter(None, map(open_snapshot, self.slots)))
        return snapshot.buffer

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.listener.close()


HostChange = Callable[[World, Host], None]


def keep_hosts(world: World, host: Host) -> None:
    """The other hosts stay as they are."""


def corrupt_copy(world: World, host: Host) -> None:
    """One byte of the copy on the first host changes."""
    if world.rank == 0:
        data = host.slot_buffer().data
        data[len(data) // 2] ^= 4


def end_server(world: World, host: Host) -> None:
    """The first host has no server any more."""
    if world.rank == 0:
        host.close()


def after_lost_host(world: World, assignment: Assignment, token: Path, change: HostChange) -> tuple[Any, ...]:
    """(tier, step, equal) of a start after the last rank's host was replaced by an empty one; step 5 was saved.

    `equal` tells whether the state is what storage has. Before the start `change` is made and storage is emptied.
    """
    ranks, hosts = RankGroup(world.control), [Host()]
    try:
        with (
            mock.patch.dict(os.environ, hosts[0].environment(token)),
            mock.patch.object(Saver, "close", _close_after_save),
        ):
            _train(open_session(assignment, world))
            _until(lambda: any(map(open_snapshot, hosts[0].slots)))  # the copy of the other rank
            _until((Path(assignment.folder) / "checkpoints" / "step-00000005").is_dir)
            ranks.run_on_all("training", lambda: None)
        session = open_session(_resume_assignment(assignment, None), world)  # without the memory of hosts
        assert (session.resumed_from, session.step) == ("storage", 5)
        stored = {name: parts.read().clone() for name, parts in session.state().items()}
        if world.rank == world.ranks - 1:
            hosts[0].close()
            hosts.insert(0, Host())
        change(world, hosts[0])
        if change is keep_hosts:
            delete_checkpoints(world, session)
        ranks.run_on_all("changing", lambda: None)
        with mock.patch.dict(os.environ, hosts[0].environment(token)):
            session = open_session(_resume_assignment(assignment, None), world)
        equal = all(torch.equal(parts.read(), stored[name]) for name, parts in session.state().items())
        return session.resumed_from, session.step, equal
    finally:
        for host in hosts:
            host.close()


def after_lost_replica(world: World, assignment: Assignment, lost: int) -> tuple[Any, ...]:
    """(tier, step, equal) of a start after the host `lost` of two was replaced by an empty one, and storage emptied.

    No server can take a copy. `equal` tells whether the state is the trained one; in storage each byte was once.
    """
    ranks, memory = RankGroup(world.control), {BUFFER_VARIABLE: f"/proc/self/fd/{empty_memory()}"}
    with mock.patch.dict(os.environ, memory):
        session = open_session(assignment, world)
        with mock.patch.dict(os.environ, {SERVER_VARIABLE: "127.0.0.1:1"}):
            _train(session)
        trained = {name: parts.read().clone() for name, parts in session.state().items()}
        sizes = ranks.run_on_all("training", lambda: sum(parts.local.nbytes for parts in session.state().values()))
        files = list((session.folder / "checkpoints" / "step-00000008").glob("*.safetensors"))
        stored = sum(entry.end - entry.start for path in files for entry in read_entries(path).values())
        assert (len(files), stored) == (world.ranks, sum(sizes) // 2)
        buffer = _buffer()
        assert buffer.size == sizes[world.rank], "the rank's part and its replica's are the whole shard"
        buffer.close()
        ranks.run_on_all("reading", lambda: None)
        delete_checkpoints(world, session)
    if world.rank // 2 == lost:
        memory[BUFFER_VARIABLE] = f"/proc/self/fd/{empty_memory()}"
    ranks.run_on_all("changing", lambda: None)
    with mock.patch.dict(os.environ, memory):
        session = open_session(_resume_assignment(assignment, None), world)
    equal = all(torch.equal(parts.read(), trained[name]) for name, parts in session.state().items())
    return session.resumed_from, session.step, equal


_close = Saver.close


def _close_after_save(saver: Saver) -> None:
    """Close a saver once its save has ended; a run without a last checkpoint does not wait for that."""
    assert saver._background is not None and saver._background.wait(60)
    _close(saver)


def _until(reached: Callable[[], bool]) -> None:
    """Wait for what writers do."""
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _resume_assignment(assignment: Assignment, at_most: int | None) -> Assignment:
    return replace(assignment, resume_at_most=at_most, attempt=2)


def resumed_losses(world: World, assignment: Assignment) -> list[tuple[Any, ...]]:
    """(tier, step) of a second start in the same snapshot buffers, after which it trains to its end and saves there."""
    with mock.patch.dict(os.environ, {BUFFER_VARIABLE: f"/proc/self/fd/{empty_memory()}"}):
        shorter_run = replace(assignment, run=replace(assignment.run, train=replace(assignment.run.train, steps=4)))
        _train(open_session(shorter_run, world))
        RankGroup(world.control).run_on_all("training", lambda: None)
        session = open_session(_resume_assignment(assignment, None), world)
        begins = session.resumed_from, session.step
        _train(session)
        RankGroup(world.control).run_on_all("training", lambda: None)
        session = open_session(_resume_assignment(assignment, None), world)
        return [begins, (session.resumed_from, session.step)]


def _train(session: TrainingSession) -> None:
    path = session.folder / "metrics.jsonl"
    metrics = MetricsWriter(path, resume_from=session.step) if session.world.leads else None
    with closing(Reporter(metrics, None, None)) as reporter:
        train(session, reporter, StopRequest())
