"""Offload of activations: saved tensors are copied to host memory after a block's forward and back before its backward.

A visit is one micro-batch in one unit. Its saved tensors are caught by autograd's own hooks and go to the host by whole storages, as bytes,
so that views of one tensor stay views of one, and every bit comes back. Copies run on two streams beside compute, one in each direction.
Where compute waits for them is worked out beforehand (`parallel.timetable`).

Streams wait for events; the host waits for nothing. Memory that another stream copies from or to is held until compute has waited for the
copy, so that the allocator cannot hand it out in between.

Weights, gathered or in fp8, and what all blocks share (rotary tables, masks) stay where they are. Method: Rhu et al. 2016 (vDNN).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.kernels.pinned import pinned
from meshwright.parallel.timetable import Visit, timetable

LEAST_BYTES = 1 << 20
"""Smaller storages stay on a GPU: copying them costs more launches than it saves memory. On a CPU, for tests, all move."""


class HostMemory:
    """Reusable buffers in host memory, pinned for GPU copies, and the streams of the copies."""

    def __init__(self, device: torch.device, least_bytes: int | None = None) -> None:
        self.device, cuda = device, device.type == "cuda"
        self.least_bytes = (LEAST_BYTES if cuda else 1) if least_bytes is None else least_bytes
        self.out, self.back = (torch.cuda.Stream(device) if cuda else None for _ in range(2))
        self.host_bytes = 0
        """Bytes of all buffers: the most that waited at once, size by size."""
        self.most_device_bytes = 0
        """The most that what goes to the host had on the device when a forward or backward began."""
        self._free: dict[int, deque[tuple[Tensor, Any]]] = defaultdict(deque)

    def take(self, size: int) -> Tensor:
        """A buffer of `size` bytes that the stream `out` may write to. Raises OutOfResources as `pinned` does."""
        if not self._free[size]:
            self.host_bytes += size
            return pinned(self, size, "activations") if self.out is not None else torch.empty(size, dtype=torch.uint8)
        buffer, read = self._free[size].popleft()
        if self.out is not None and read is not None:
            self.out.wait_event(read)
        return buffer

    def give(self, buffer: Tensor, read: Any) -> None:
        """Take a buffer back that is read until the event `read` (None: no longer)."""
        self._free[buffer.numel()].append((buffer, read))


@dataclass
class _Storage:
    """One storage of a visit, as bytes: on the device, on the host, or both while it travels."""

    size: int
    device: Tensor | None
    host: Tensor | None = None
    unread: int = 0
    """Saved tensors in it that the backward has yet to ask for; with the last one the device's memory goes, as without hooks."""


@dataclass(frozen=True)
class _Saved:
    """A tensor in a storage that may be away."""

    storage: _Storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Parked:
    """What one visit keeps for its backward. `others` are addresses of storages that are not its own."""

    def __init__(self, memory: HostMemory, others: Collection[int]) -> None:
        self._memory, self._others = memory, others
        self._storages: dict[int, _Storage] = {}
        self._left: Any = None
        self._came: Any = None

    def catching(self) -> AbstractContextManager[Any]:
        """Autograd's saved tensors inside come here."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @property
    def device_bytes(self) -> int:
        """What is on the device now."""
        return sum(storage.size for storage in self._storages.values() if storage.device is not None)

    def send(self, around: AbstractContextManager[None] | None = None) -> None:
        """Begin to copy everything out, behind what compute was given until now."""
        with _beside(self._memory.out), around or nullcontext():
            for storage in self._storages.values():
                assert storage.device is not None
                storage.host = self._memory.take(storage.size)
                storage.host.copy_(storage.device, non_blocking=True)
            self._left = _stamp(self._memory.out)

    def settle(self) -> None:
        """Let compute wait until everything is out, and let go of the device's memory."""
        _wait(self._left)
        for storage in self._storages.values():
            storage.device = None

    def fetch(self, around: AbstractContextManager[None] | None = None) -> None:
        """Begin to copy everything back, beside what compute is given from now on."""
        for storage in self._storages.values():
            storage.device = torch.empty(storage.size, dtype=torch.uint8, device=self._memory.device)
        # Behind compute so far: the new memory may be that of tensors which it has yet to read.
        with _beside(self._memory.back), around or nullcontext():
            for storage in self._storages.values():
                assert storage.device is not None and storage.host is not None
                storage.device.copy_(storage.host, non_blocking=True)
            self._came = _stamp(self._memory.back)

    def arrive(self) -> None:
        """Let compute wait until everything is here."""
        _wait(self._came)

    def close(self) -> None:
        """The backward has been given to the device: the buffers may be used again."""
        for storage in self._storages.values():
            if storage.host is not None:
                self._memory.give(storage.host, self._came)
        self._storages.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        whole = tensor.untyped_storage()
        address, size = whole.data_ptr(), whole.nbytes()
        own = (
            tensor.is_floating_point()
            and tensor.device.type == self._memory.device.type
            and address not in self._others
        )
        if not own or size < self._memory.least_bytes:
            return tensor
        storage = self._storages.get(address)
        if storage is None:
            as_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(whole, 0, (size,), (1,))
            storage = self._storages[address] = _Storage(size, as_bytes)
        storage.unread += 1
        return _Saved(storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        storage = saved.storage
        if storage.device is None:  # a node that asks twice
            assert storage.host is not None
            storage.device = storage.host.to(self._memory.device, non_blocking=True)
        tensor = torch.empty(0, dtype=saved.dtype, device=self._memory.device)
        tensor.set_(storage.device.untyped_storage(), saved.offset, saved.shape, saved.stride)
        storage.unread -= 1
        if storage.unread <= 0:
            storage.device = None
        return tensor


def _beside(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """What is given to the device inside runs on `stream`, behind what compute was given until now; on a CPU it runs here."""
    if stream is None:
        return nullcontext()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    return torch.cuda.stream(stream)


def _stamp(stream: torch.cuda.Stream | None) -> Any:
    return None if stream is None else stream.record_event()


def _wait(event: Any) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Where the memory of `tensors` begins."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def handed_in(x: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf that has x's shape and no memory, and x to compute with, whose gradient becomes the leaf's.

    A leaf is held by its graph; x as one would stay on the device.
    """
    leaf = x.new_empty(()).expand(x.shape).requires_grad_()
    return leaf, _HandedIn.apply(leaf, x)


class _HandedIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor) -> Tensor:
        del ctx, leaf
        return x.detach()

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradient, None


class Moves:
    """The visits of one step that go to host memory, and when their copies begin and end.

    `computes`, `keeps` and `moved` as in `timetable`. `concurrent_span` makes the span of a copy from its name and its lane, or None.
    """

    def __init__(
        self,
        memory: HostMemory | None,
        computes: Sequence[tuple[Visit, ...]],
        keeps: Mapping[Visit, float],
        moved: Collection[Visit],
        concurrent_span: Callable[[str, str], AbstractContextManager[None] | None],
    ) -> None:
        self._memory, self._aside = memory, concurrent_span
        self._times = timetable(tuple(computes), tuple(keeps.items()), frozenset(moved))
        self._position = -1
        self._parked: dict[Visit, Parked] = {}

    def begin(self) -> None:
        """The next forward or backward begins: what must have left by now is let go, and what there is room for sets out back."""
        self._position += 1
        for visit in self._times.left.get(self._position, ()):
            self._parked[visit].settle()
        for visit in self._times.back.get(self._position, ()):
            self._parked[visit].fetch(self._span("fetch", visit))
        if self._memory is not None:
            here = sum(parked.device_bytes for parked in self._parked.values())
            self._memory.most_device_bytes = max(self._memory.most_device_bytes, here)

    def park(self, visit: Visit, others: Collection[int]) -> Parked | None:
        """Where the visit's forward leaves what it keeps; None when that stays. `others` as in `Parked`."""
        if visit not in self._times.moved:
            return None
        assert self._memory is not None, "a plan that offloads has memory to offload to"
        parked = self._parked[visit] = Parked(self._memory, others)
        return parked

    def forward_ended(self, visit: Visit) -> None:
        """What the visit's forward has left goes out."""
        if visit in self._parked:
            self._parked[visit].send(self._span("offload", visit))

    @contextmanager
    def backward(self, visit: Visit) -> Iterator[None]:
        """Around the visit's backward: it begins when everything is back."""
        parked = self._parked.get(visit)
        if parked is None:
            yield
            return
        parked.arrive()
        yield
        parked.close()
        del self._parked[visit]

    def _span(self, name: str, visit: Visit) -> AbstractContextManager[None] | None:
        stage, micro_batch, unit = visit
        return self._aside(f"{name} {stage}.{micro_batch}/{unit}", name)
