"""Staging: copies of a rank's state into its snapshot buffer beside the forward and backward passes of the next step.

Copies run group by group. The update of the next step waits for each group before it changes the group's state. State on
a CUDA device is copied on a stream of its own, with one event a group; a thread gives it the copies of a large state.
State in host memory (a CPU rank's, or an offloaded optimizer's) is copied by a thread, with one flag a group. The groups
that are updated first may be copied to memory beside the state first, and from there to the snapshot buffer at the end
(`policies.snapshot_copies`).

The checksum of each piece is computed from the state before its group is updated (`checkpoint.write.source_checksum`).
The writer compares it with what it reads from the snapshot buffer.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from meshwright.checkpoint.memory.snapshot_buffer import DATA_OFFSET, SnapshotBuffer
from meshwright.checkpoint.write.checksum import Checksum
from meshwright.checkpoint.write.layout import FileLayout
from meshwright.checkpoint.write.source_checksum import DeviceChecksums, NumberedPiece, host_checksum
from meshwright.kernels.pinned import PIN_BYTES, pin_pages
from meshwright.spec.errors import OutOfResources
from meshwright.state.snapshot import HostState

POPULATE_THREADS = 4
"""Threads that take pages from the host."""
POPULATE_BYTES = 32 << 20
"""Bytes of one call for pages."""
MADV_POPULATE_WRITE = 23
"""The kernel's number for that call (madvise(2), Linux 5.14)."""
TABLE_BYTES = tuple(1 << power for power in range(6, 14))
"""Sizes of the tables of an update in groups."""
TABLES = 64
"""Tables that are under way at a time."""
COPY_BYTES = 64 << 20
"""Largest copy, a divisor of `PIN_BYTES`: between two of them the copy engine serves the small copies of training."""

QUEUED_COPIES = 1024
"""Maximum number of copies that are given to the device at once: its queue holds about as many operations and then blocks the host."""
COPIES_AHEAD = 128
"""Copies of a larger snapshot that are given to the device before earlier ones have ended."""

Copy = tuple[Tensor, Tensor]
"""Destination in the snapshot buffer and source, both as bytes."""


class PinnedSnapshotBuffer:
    """The snapshot buffer as a tensor, page-locked for a CUDA device until the buffer is garbage-collected."""

    def __init__(self, buffer: SnapshotBuffer, device: torch.device) -> None:
        self._buffer = buffer
        self._device = device
        # Its storage begins with the first locked part: torch may ask the runtime about the address where a tensor's storage begins.
        self.data = torch.frombuffer(buffer.memory, dtype=torch.uint8, offset=DATA_OFFSET)

    def prepare(self) -> None:
        """Take the pages from the host and lock them; other threads of Python run meanwhile.

        Raises OutOfResources when the host's memory cannot be locked.
        """
        parts = self.data.split(PIN_BYTES)
        with ThreadPoolExecutor(POPULATE_THREADS) as pool:
            for part, _ in zip(parts, pool.map(_populate, parts), strict=True):
                if self._device.type == "cuda":
                    self._pin(part)
        if self._device.type == "cuda":
            _fill_pinned_cache(self._device)

    def _pin(self, part: Tensor) -> None:
        with torch.cuda.device(self._device):
            pinned = pin_pages(self._buffer, part)
        if not pinned:
            raise OutOfResources(
                f"{self.data.nbytes:,} bytes of host memory for checkpoints could not be pinned; raise the host's limit of "
                "locked memory (ulimit -l), or set checkpoint.mode=sync"
            )


def _fill_pinned_cache(device: torch.device) -> None:
    """Let torch's cache have small page-locked buffers for the first update in groups.

    Each group copies a table to the device. An allocation then would synchronise with the device.
    """
    with torch.cuda.device(device):
        buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in TABLE_BYTES for _ in range(TABLES)]
    del buffers


def _populate(part: Tensor) -> None:
    """Make the kernel provide the pages of a part, in huge pages where it has them."""
    system = ctypes.CDLL(None, use_errno=True)
    first = part.data_ptr()
    system.madvise(ctypes.c_void_p(first), ctypes.c_size_t(part.nbytes), mmap.MADV_HUGEPAGE)
    for start in range(0, part.nbytes, POPULATE_BYTES):
        count = min(POPULATE_BYTES, part.nbytes - start)
        if system.madvise(ctypes.c_void_p(first + start), ctypes.c_size_t(count), MADV_POPULATE_WRITE):
            part[start:].zero_()  # before Linux 5.14
            return


class CopySequence:
    """The copies of a snapshot from one memory (device or host) into the snapshot buffer, by groups in the order of the update."""

    def __init__(self, groups: int) -> None:
        self.copies: list[list[Copy]] = [[] for _ in range(groups)]
        self.pieces: list[list[NumberedPiece]] = [[] for _ in range(groups)]
        self._buffers: list[list[Tensor]] = []

    def __bool__(self) -> bool:
        return any(self.copies)

    @property
    def group_bytes(self) -> list[int]:
        """Bytes of each group."""
        return [sum(source.numel() for _, source in group) for group in self.copies]

    @property
    def operations(self) -> int:
        """Number of copies of a snapshot."""
        return sum(map(len, self.copies)) + sum(map(len, self._buffers))

    @property
    def buffered_groups(self) -> int:
        """Number of groups that are copied to a buffer first."""
        return len(self._buffers)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.numel() for group in self._buffers for buffer in group)

    def buffer_first_groups(self, count: int) -> None:
        """Copy the first `count` groups to a buffer in their own memory first, from the next snapshot on.

        Raises torch.OutOfMemoryError, and then has no buffers, if the memory is full.
        """
        if count == len(self._buffers):
            return
        self._buffers = []
        self._buffers = [[torch.empty_like(source) for _, source in group] for group in self.copies[:count]]

    def run(
        self,
        copy: Callable[[Tensor, Tensor], object],
        release: Callable[[int], object],
        add_checksums: Callable[[int], object],
    ) -> None:
        """Make the copies with `copy(target, source)`; `release(group)` is called when the state of a group may change.

        Before that, `add_checksums(group)` computes the checksums of that state.
        """
        for number, buffers in enumerate(self._buffers):
            add_checksums(number)
            for buffer, (_, source) in zip(buffers, self.copies[number], strict=True):
                copy(buffer, source)
            release(number)
        for number in range(len(self._buffers), len(self.copies)):
            add_checksums(number)
            for target, source in self.copies[number]:
                copy(target, source)
            release(number)
        for number, buffers in enumerate(self._buffers):
            for buffer, (target, _) in zip(buffers, self.copies[number], strict=True):
                copy(target, buffer)


class Stager:
    """Copies the pieces of `layout` into `buffer`.

    `groups` are the optimizer's parameters in the order of its update, and `parameter_of` names the parameter of each
    tensor in the layout.
    """

    def __init__(
        self,
        layout: FileLayout,
        buffer: PinnedSnapshotBuffer,
        groups: Sequence[Sequence[str]],
        parameter_of: Mapping[str, str],
    ) -> None:
        self.groups = [tuple(group) for group in groups]
        group_of = {parameter: number for number, group in enumerate(self.groups) for parameter in group}
        self.from_device = CopySequence(len(self.groups))
        self.from_host = CopySequence(len(self.groups))
        for index, piece in enumerate(layout.pieces):
            sequence = self.from_device if piece.source.is_cuda else self.from_host
            target = buffer.data[piece.start : piece.end]
            group = group_of[parameter_of[piece.name]]
            sequence.copies[group] += _within_parts(target, piece.source, piece.start)
            sequence.pieces[group].append((index, piece.source))
        sources = (source for group in self.from_device.pieces for _, source in group)
        device = next((source.device for source in sources), None)
        self._stream = None if device is None else torch.cuda.Stream(device)
        self._device_checksums = None if device is None else DeviceChecksums(self.from_device.pieces, device)

    def start(self, host_state: HostState | None = None) -> Copies:
        """Start copies of the state as the work given to the device so far leaves it, in host memory as `host_state` says."""
        copies = Copies(self.groups, self._device_checksums)
        if self._stream is not None and self._device_checksums is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._device_checksums.start()
            if self.from_device.operations <= QUEUED_COPIES:
                self._copy_device_state(copies, self._stream, self._device_checksums)
            else:
                copies.begin_device_copies(number for number, group in enumerate(self.from_device.copies) if group)
                work = (copies, self._stream, self._device_checksums, COPIES_AHEAD)
                threading.Thread(target=self._copy_device_state, args=work, name="device-staging", daemon=True).start()
        if self.from_host:
            thread = threading.Thread(
                target=self._copy_host_state, args=(copies, host_state), name="staging", daemon=True
            )
            copies.begin_host_copies(number for number, group in enumerate(self.from_host.copies) if group)
            thread.start()
        return copies

    @torch.no_grad()
    def _copy_device_state(
        self, copies: Copies, stream: torch.cuda.Stream, checksums: DeviceChecksums, ahead: int | None = None
    ) -> None:
        """Give the copies to the device; with `ahead`, only about so many of them before earlier ones have ended."""
        given: list[torch.cuda.Event] = []
        count = 0

        def copy(target: Tensor, source: Tensor) -> None:
            nonlocal count
            target.copy_(source, non_blocking=True)
            count += 1
            if ahead is not None and count % (ahead // 2) == 0:
                given.append(_recorded_event())
                if len(given) > 1:
                    given.pop(0).synchronize()

        def release(group: int) -> None:
            checksums.wait(group)
            copies.release(group)

        try:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                copies.start_device_copies()
                self.from_device.run(copy, release, checksums.sum_group)
                checksums.copy_to_host()
        except BaseException as error:
            if ahead is None:
                raise
            copies.failure = error
        finally:
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                copies.end_device_copies()

    @torch.no_grad()
    def _copy_host_state(self, copies: Copies, host_state: HostState | None) -> None:
        def current(source: Tensor) -> Tensor:
            return source if host_state is None else host_state.current(source)

        def copy(target: Tensor, source: Tensor) -> None:
            _copy(target, current(source))  # of encoded state the source is on the meta device

        def add_checksums(group: int) -> None:
            for index, source in self.from_host.pieces[group]:
                copies.host_checksums[index] = host_checksum(current(source))

        try:
            if host_state is not None:
                host_state.wait()
            copies.start_host_copies()
            self.from_host.run(copy, copies.release_host_group, add_checksums)
        except BaseException as error:
            copies.failure = error
        finally:
            copies.end_host_copies()


class Copies:
    """Copies that run, as `SnapshotCopies` for the optimizer."""

    def __init__(self, groups: Sequence[tuple[str, ...]], device_checksums: DeviceChecksums | None = None) -> None:
        self.groups = groups
        self._device_checksums = device_checksums
        self.host_checksums: dict[int, Checksum] = {}
        """Checksums of pieces in host memory by position in the file."""
        self._group_of = {parameter: number for number, group in enumerate(groups) for parameter in group}
        self._device_events: dict[int, torch.cuda.Event] = {}
        self._device_span: list[torch.cuda.Event] = []
        self._device_flags: dict[int, threading.Event] = {}
        """For each group whose copies another thread gives to the device, whether it has."""
        self._device_end: threading.Event | None = None
        self._host_flags: dict[int, threading.Event] = {}
        self._host_end: threading.Event | None = None
        self._host_start = 0.0
        self._host_seconds = 0.0
        self.failure: BaseException | None = None

    def begin_device_copies(self, groups: Iterable[int]) -> None:
        """Another thread is going to give copies of `groups` to the device."""
        self._device_flags = {number: threading.Event() for number in groups}
        self._device_end = threading.Event()

    def start_device_copies(self) -> None:
        """Copies from the device follow on the current stream."""
        self._device_span = [_recorded_event()]

    def release(self, group: int) -> None:
        """The state of `group` on the device may change once the copies given to the current stream so far have ended."""
        self._device_events[group] = _recorded_event()
        if group in self._device_flags:
            self._device_flags[group].set()

    def end_device_copies(self) -> None:
        """All copies from the device were given to the current stream, or one has failed."""
        self._device_span.append(_recorded_event())
        for flag in self._device_flags.values():
            flag.set()
        if self._device_end is not None:
            self._device_end.set()

    def begin_host_copies(self, groups: Iterable[int]) -> None:
        """Copies of `groups`, which have state in host memory, follow."""
        self._host_flags = {number: threading.Event() for number in groups}
        self._host_end = threading.Event()

    def start_host_copies(self) -> None:
        """The copies of host memory begin: the state is complete there."""
        self._host_start = time.perf_counter()

    def release_host_group(self, group: int) -> None:
        """The state of `group` in host memory may change."""
        if group in self._host_flags:
            self._host_flags[group].set()

    def end_host_copies(self) -> None:
        """All copies of host memory have ended, or one has failed."""
        for flag in self._host_flags.values():
            flag.set()
        self._host_seconds = time.perf_counter() - self._host_start
        assert self._host_end is not None
        self._host_end.set()

    def wait(self, parameters: Iterable[str], *, host: bool = True) -> None:
        """See `SnapshotCopies`."""
        for number in sorted({self._group_of[parameter] for parameter in parameters}):
            if host and number in self._host_flags:
                self._host_flags[number].wait()
            if number in self._device_flags:
                self._device_flags[number].wait()
            if number in self._device_events:
                torch.cuda.current_stream().wait_event(self._device_events[number])

    def join(self) -> None:
        """Return when all copies are complete; raises what made one fail."""
        for end in (self._host_end, self._device_end):
            if end is not None:
                end.wait()
        for event in self._device_span:
            event.synchronize()
        if self.failure is not None:
            raise self.failure

    @property
    def checksums(self) -> list[Checksum]:
        """The checksum of each piece in file order, after `join`; computed from the state itself, not from the snapshot buffer."""
        on_device = {} if self._device_checksums is None else self._device_checksums.result()
        by_index = self.host_checksums | on_device
        return [by_index[index] for index in sorted(by_index)]

    @property
    def seconds(self) -> float:
        """Duration of the longer of the copies from the device and from the host, after `join`."""
        return max(self._host_seconds, self.device_seconds or 0.0)

    @property
    def device_seconds(self) -> float | None:
        """Duration of the copies from the device, after `join`; None if there were none."""
        if not self._device_span:
            return None
        first, last = self._device_span
        return first.elapsed_time(last) / 1e3


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _within_parts(target: Tensor, source: Tensor, start: int) -> list[Copy]:
    """A copy to `start` of the snapshot buffer, split where page-locked parts meet and into copies of at most `COPY_BYTES`."""
    copies = []
    done = 0
    while done < source.numel():
        count = min(source.numel() - done, COPY_BYTES - (start + done) % COPY_BYTES)
        copies.append((target[done : done + count], source[done : done + count]))
        done += count
    return copies
