"""Asynchronous saves of one rank: a snapshot is copied to the snapshot buffer, and the writer process writes it to storage.

All ranks begin a save after the same step and agree on nothing else while they train: the attempt's name follows from
the lease's epoch and the number of the save, and the writers meet on the storage. At most one save is in flight; the
first rank knows when it has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.format.contents import plain_contents
from meshwright.checkpoint.format.header import TensorHeader
from meshwright.checkpoint.format.manifest import step_name
from meshwright.checkpoint.memory.partner_copy import Partner
from meshwright.checkpoint.memory.snapshot_buffer import SnapshotBuffer, allocated_bytes, available_host_memory
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.write.layout import plan_layout
from meshwright.checkpoint.write.staging import Copies, PinnedSnapshotBuffer, Stager
from meshwright.checkpoint.write.writer import Save, WriterSetup
from meshwright.checkpoint.write.writer_process import STALLED_SECONDS, WriterProcess
from meshwright.policies.snapshot_copies import PassTimes, plan_device_copies
from meshwright.spec.errors import MeshwrightError, OutOfResources
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.host_limits import usable_cores
from meshwright.spec.job import ASYNC_BYTES
from meshwright.spec.run import Lease
from meshwright.state.parts import StateParts
from meshwright.state.snapshot import HostState

RESERVED_SHARE = 0.1
"""Share of the available host memory that snapshot buffers leave free."""
SLOWEST_RATE = 50e6
"""Bytes per second of the slowest storage for which the writer is given enough time to flush a file."""
PREPARE_SECONDS = 120.0
"""How long the first save waits for the snapshot buffer."""
SAVES_PER_START = 1 << 20
"""Each start of the ranks under one lease has this many numbers for its saves, so that the numbers of two starts differ."""
DEVICE_RESERVE = 0.09
"""Share of a device's memory that stays free when buffers for snapshots are allocated."""

log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class SaveResult:
    """How the save of `step` ended on this rank: with a failure or, on the first rank, with the checkpoint's folder and figures.

    `seconds` has the seconds of the phases `staging`, `writing`, `waiting` (for other ranks) and `commit`. On other ranks `path` and
    `seconds` are None.
    """

    step: int
    failure: MeshwrightError | None = None
    path: Path | None = None
    bytes: int = 0
    seconds: dict[str, float] | None = None


@dataclass(frozen=True)
class LiveState:
    """A rank's tensors, whose memory does not move, and how its optimizer updates them.

    - `groups`: parameters in the order of their update.
    - `parameter_of`: the name of the parameter that each tensor belongs to.
    - `host_state`: returns the state in host memory after the updates so far; None if there is none.
    - `allocate_second_buffers`: after this call, updates of state in host memory do not wait for the copies of a snapshot.
    """

    tensors: Mapping[str, StateParts]
    groups: Sequence[Sequence[str]]
    parameter_of: Mapping[str, str]
    host_state: Callable[[], HostState | None] = lambda: None
    allocate_second_buffers: Callable[[], object] = lambda: None


class BackgroundSaver:
    """The asynchronous saves of a start. Construction, `agree_on_readiness` and `begin` are collective; other methods are not."""

    def __init__(
        self,
        folder: Path,
        ranks: RankGroup,
        state: LiveState,
        device: torch.device,
        *,
        lease: Lease,
        keep: int,
        local_ranks: int,
        parent: int | None = None,
        start: int = 1,
        partner: Partner | None = None,
        partner_every: int = 1,
        replicas: Sequence[int] | None = None,
        kept_open: Sequence[int] = (),
        warm_up: Callable[[], object] = lambda: None,
        **limits: float,
    ) -> None:
        """Plan the saves of `state` into the folder `folder`.

        - `start`: number of this start of the ranks under the lease, from 1.
        - `partner`: receives a copy of every `partner_every`-th snapshot.
        - `replicas`: for each rank another rank with the same state. The rank's snapshots also contain the part of that other rank.
        - `kept_open`, `limits` (of time): passed to `WriterProcess`.
        - `warm_up`: called when everything else is prepared.
        """
        self._ranks = ranks
        self._state = state
        self._device = device
        self._lease = lease
        self.layout = plan_layout(ranks, state.tensors, replicas)
        self._setup = WriterSetup(
            folder=str(folder),
            rank=ranks.rank,
            ranks=ranks.size,
            headers=_plain_headers(self.layout.headers),
            contents=plain_contents(self.layout.contents),
            lease=asdict(lease),
            keep=keep,
            threads=writer_threads(local_ranks),
            torch_version=str(torch.__version__),
            parent=parent,
            partner=None if partner is None else asdict(partner),
            replica=self.layout.replica,
            replica_headers=_plain_headers(self.layout.replica_headers),
        )
        self._partner_every = partner_every
        self._kept_open = kept_open
        self._warm_up = warm_up
        # A flush of the whole file shows no progress until it ends.
        self._limits = {"stalled_seconds": STALLED_SECONDS + self.layout.bytes / SLOWEST_RATE} | limits
        self.second_buffers = False
        """Whether `prepare` allocates the optimizer's second buffers in host memory."""
        self._buffer: SnapshotBuffer | None = None
        self.stager: Stager | None = None
        self.writer: WriterProcess | None = None
        self._prepared: threading.Thread | None = None
        self._failure: Exception | None = None
        self._saves = (start - 1) * SAVES_PER_START
        self._current: _SaveInFlight | None = None

    def prepare(self) -> None:
        """Allocate the snapshot buffer and start the writer in a thread; a second call does nothing."""
        if self._prepared is None:
            self._prepared = threading.Thread(target=self._prepare, name="snapshot buffer", daemon=True)
            self._prepared.start()
            if self.layout.bytes < ASYNC_BYTES:
                self._prepared.join()  # milliseconds

    def agree_on_readiness(self) -> None:
        """Wait until snapshot buffer and writer are ready on every rank. If one is not, all ranks raise the same error."""
        self.prepare()

        def check() -> None:
            assert self._prepared is not None
            self._prepared.join(PREPARE_SECONDS)
            if self._prepared.is_alive():
                raise OutOfResources(f"the snapshot buffer was not ready within {PREPARE_SECONDS:.0f} s")
            if self._failure is not None:
                raise self._failure

        self._ranks.run_on_all("preparing checkpoints", check)

    @property
    def describes_first(self) -> bool:
        """Whether this rank's snapshots contain the first rank's part."""
        return 0 in (self._setup.rank, self._setup.replica)

    @property
    def in_flight(self) -> bool:
        """Whether this rank's part of a save is not finished."""
        return self._current is not None and not self._current.ended

    @property
    def prepared(self) -> bool:
        """Whether the preparation has ended on this rank, successful or not."""
        return self._prepared is not None and not self._prepared.is_alive()

    def begin(self, step: int, *, urgent: bool = False, times: PassTimes | None = None) -> Copies:
        """Begin the save of the state after `step`, the last step launched. `describe` completes the save.

        Returns the copies of the state; a part of the state may change as soon as its copy has ended. With `times` (of a step), state whose
        copies the next update would have to wait for is copied within device memory first, as far as there is room. If a save of this rank
        is still in flight, it has failed on another rank and is given up.
        """
        assert self.stager is not None and self._buffer is not None and self.writer is not None, (
            "agree_on_readiness first"
        )
        if self._current is not None:
            self._current.give_up()
        if times is not None:
            self._fit_device_copies(self.stager, times)
        self._saves += 1
        generation = self._buffer.begin_snapshot()
        copies = self.stager.start(self._state.host_state())
        # The part after the hyphen must be unique by itself, because it is used to name folders that are set aside.
        attempt = f"{self._lease.epoch}-{self._lease.epoch:x}{self._saves:08x}"
        # If the run waits for its last checkpoint, no copy is sent to the partner, because it would only be needed later.
        to_partner = not urgent and (self._saves - 1) % SAVES_PER_START % self._partner_every == 0
        save = Save(
            step=step, attempt=attempt, generation=generation, staging_seconds=0.0, urgent=urgent, to_partner=to_partner
        )
        self._current = _SaveInFlight(save, copies, self._buffer, self.writer)
        return copies

    def describe(self, step: int, plain: Callable[[], Mapping[str, bytes]]) -> None:
        """Supply the plain files of the save of `step`. `plain` is called in another thread; only ranks with `describes_first` give files.

        The call says that the loss and gradient norm of the step were finite. Without it the snapshot is not written.
        """
        if self._current is not None and self._current.save.step == step:
            self._current.describe(plain)

    def give_up(self) -> None:
        """End the save in flight, if there is one, without a checkpoint. Its copies are completed first."""
        if self._current is not None:
            self._current.give_up()

    def result(self) -> SaveResult | None:
        """Return the result of the last save once; None as long as there is none, and afterwards."""
        return None if self._current is None else self._current.take_result()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` until no save of this rank is in flight. Returns whether none is."""
        return self._current is None or self._current.join(seconds)

    def close(self) -> None:
        """Let the writer complete its saves and end."""
        if self.writer is not None:
            self.writer.close()

    def _fit_device_copies(self, stager: Stager, times: PassTimes) -> None:
        """Copy more groups on the device first, if `times` and the copies of the last save require it; never fewer than before."""
        sequence = stager.from_device
        if not sequence:
            return
        measured = None if self._current is None else self._current.device_seconds
        room = _free_device_bytes(self._device) + sequence.buffered_bytes
        plan = plan_device_copies(sequence.group_bytes, times, room, measured)
        if plan.groups <= sequence.buffered_groups:
            return
        log.info(
            "%.2f GB of a snapshot are first copied within device memory; the update still waits %.3f s",
            plan.bytes / 1e9,
            plan.stall_seconds,
        )
        try:
            sequence.buffer_first_groups(plan.groups)
        except torch.OutOfMemoryError:
            log.warning("device memory has no room for %.2f GB of a snapshot; the update waits", plan.bytes / 1e9)

    def _prepare(self) -> None:
        try:
            self._buffer = SnapshotBuffer.create(self.layout.bytes)
            pinned = PinnedSnapshotBuffer(self._buffer, self._device)
            pinned.prepare()
            self.stager = Stager(self.layout, pinned, self._state.groups, self._state.parameter_of)
            self.writer = WriterProcess(self._buffer, self._setup, kept_open=self._kept_open, **self._limits)
            self.writer.start()
            self._warm_up()
            if self.second_buffers:
                self._allocate_second_buffers()
        except Exception as error:
            self._failure = error

    def _allocate_second_buffers(self) -> None:
        try:
            self._state.allocate_second_buffers()
        except OutOfResources as error:
            log.warning("%s; updates wait for copies of snapshots", error)


def _plain_headers(headers: Sequence[TensorHeader]) -> list[Any]:
    return [[header.key, header.dtype, list(header.shape)] for header in headers]


class _SaveInFlight:
    """Save of a rank in progress, followed by a thread from its copies to the writer's last reply."""

    def __init__(self, save: Save, copies: Copies, buffer: SnapshotBuffer, writer: WriterProcess) -> None:
        self.save = save
        self._copies = copies
        self._buffer = buffer
        self._writer = writer
        self._described = threading.Event()
        self._plain: Callable[[], Mapping[str, bytes]] = dict
        self._given_up = False
        self.device_seconds: float | None = None
        """Duration of the copies from the device, once they have ended."""
        self._result: SaveResult | None = None
        self._thread = threading.Thread(target=self._follow, name="save", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def describe(self, plain: Callable[[], Mapping[str, bytes]]) -> None:
        if not self._described.is_set():
            self._plain = plain
            self._described.set()

    def give_up(self) -> None:
        """Stop a save that is still in flight: end its writer, which another one replaces."""
        if not self.ended:
            self._given_up = True
            self._described.set()
            self._writer.kill()
            self._thread.join()

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return self.ended

    def take_result(self) -> SaveResult | None:
        result = self._result
        self._result = None
        return result

    def _follow(self) -> None:
        step = self.save.step
        try:
            self._copies.join()
            self.device_seconds = self._copies.device_seconds
            staging = self._copies.seconds
            checksums = [list(checksum) for checksum in self._copies.checksums]
            self._buffer.complete_snapshot()
            self._described.wait()
            if self._given_up:
                return
            plain = {name: data.decode() for name, data in self._plain().items()}
            complete = replace(self.save, staging_seconds=staging, checksums=checksums, plain=plain, finite=True)
            self._writer.save(complete, self._committed)
            self._result = self._result or SaveResult(step)
        except Exception as error:
            failure = as_meshwright_error(error, "" if isinstance(error, MeshwrightError) else f"saving step {step}")
            if not isinstance(error, MeshwrightError):
                self._writer.discard(self.save)
            self._result = SaveResult(step, failure=failure)

    def _committed(self, reply: dict[str, Any]) -> None:
        path = self._writer.checkpoints / step_name(self.save.step)
        self._result = SaveResult(self.save.step, path=path, bytes=reply["bytes"], seconds=reply["seconds"])


def memory_obstacle(
    rank_bytes: int, ranks: RankGroup, local_ranks: int, copies: Callable[[], int] = lambda: 0
) -> str | None:
    """Return why the hosts' memory does not hold `rank_bytes` for each rank, or None where it does.

    `copies` returns the bytes that this host's copies of a partner host's snapshots will take beside that.
    Collective over `ranks`; the same answer on all.
    """

    def look() -> tuple[int, int, int]:
        missing = max(0, rank_bytes - allocated_bytes())
        return missing * local_ranks, copies(), int(available_host_memory() * (1 - RESERVED_SHARE))

    for buffers, of_partner, available in ranks.run_on_all("planning checkpoints", look):
        if buffers + of_partner > available:
            partner = f" and {of_partner / 1e9:.1f} GB for a partner host's snapshots (checkpoint.partner)"
            needed = f"{buffers / 1e9:.1f} GB of snapshot buffers{partner if of_partner else ''}"
            return f"{needed} on a host with {available / 1e9:.1f} GB of memory left"
    return None


def _free_device_bytes(device: torch.device) -> int:
    """Return the bytes of device memory that buffers for snapshots may use."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(free - DEVICE_RESERVE * total))


def writer_threads(local_ranks: int) -> int:
    """Threads of one writer: its rank's share of the host's processor cores, at most 8."""
    return max(1, min(8, usable_cores() // local_ranks))
