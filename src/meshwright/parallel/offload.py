"""Offload of activations: a block's saved tensors are copied to host memory after its forward and back before its backward.

A visit is one micro-batch in one unit, here in a block of the model. Autograd's saved-tensor hooks collect the visit's tensors. Whole
storages are copied as bytes, so that views of one storage stay views of one storage and every bit is preserved. Two copy streams overlap
with compute, one stream for each direction. `parallel.timetable` decides before the step when device memory is freed and when the copy back
starts.

Streams wait for events; the host does not wait. Memory that a copy stream reads or writes is referenced until the compute stream has waited
for the copy, so that the allocator cannot reuse it earlier.

Gathered weights, fp8 weights and tensors that all blocks share (rotary tables, masks) stay on the device. Method: Rhu et al. 2016 (vDNN).
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

from meshwright.kernels.pinned import allocate_pinned
from meshwright.parallel.timetable import Visit, build_timetable

MIN_BYTES = 1 << 20
"""Storages with fewer bytes stay on the GPU: they save little memory compared to the time of their kernel launches.

CPU ranks, which exist for tests, offload storages of every size.
"""


class HostMemory:
    """Reusable host buffers, pinned for GPU copies, and the two copy streams. `purpose` names the buffers in error messages."""

    def __init__(self, device: torch.device, min_bytes: int | None = None, purpose: str = "activations") -> None:
        self.device = device
        self._purpose = purpose
        cuda = device.type == "cuda"
        if min_bytes is None:
            min_bytes = MIN_BYTES if cuda else 1
        self.min_bytes = min_bytes
        self.offload_stream, self.fetch_stream = (torch.cuda.Stream(device) if cuda else None for _ in range(2))
        self.host_bytes = 0
        """Bytes of all buffers. For each size there are as many buffers as were in use at the same time at most."""
        self.peak_device_bytes = 0
        """Peak bytes on the device of tensors that are offloaded at other times; sampled at the start of each forward and backward."""
        self._free: dict[int, deque[tuple[Tensor, Any]]] = defaultdict(deque)

    def acquire(self, size: int) -> Tensor:
        """Return a buffer of `size` bytes that `offload_stream` may write to. Raises OutOfResources if host memory cannot be allocated."""
        if not self._free[size]:
            self.host_bytes += size
            return (
                allocate_pinned(self, size, self._purpose)
                if self.offload_stream is not None
                else torch.empty(size, dtype=torch.uint8)
            )
        buffer, read = self._free[size].popleft()
        if self.offload_stream is not None and read is not None:
            self.offload_stream.wait_event(read)
        return buffer

    def release(self, buffer: Tensor, read: Any) -> None:
        """Make a buffer available again after the event `read`, which follows its last read; None: at once."""
        self._free[buffer.numel()].append((buffer, read))


@dataclass
class _Storage:
    """A storage that a visit saved, as bytes: on the device, in host memory, or in both while a copy runs."""

    size: int
    device: Tensor | None
    host: Tensor | None = None
    unread: int = 0
    """Number of saved tensors of this storage that the backward has not read yet; at 0 the device memory is freed."""


@dataclass(frozen=True)
class _SavedTensor:
    """What autograd keeps instead of a saved tensor: its storage, and how the tensor is a view of this storage."""

    storage: _Storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class SavedActivations:
    """The tensors that one visit saves for its backward. Storages with an address in `excluded` stay on the device."""

    def __init__(self, memory: HostMemory, excluded: Collection[int]) -> None:
        self._memory = memory
        self._excluded = excluded
        self._storages: dict[int, _Storage] = {}
        self._offloaded: Any = None
        self._fetched: Any = None

    def collect(self) -> AbstractContextManager[Any]:
        """Context in which the tensors that autograd saves are collected here."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @property
    def device_bytes(self) -> int:
        """Bytes of these tensors that are on the device now."""
        return sum(storage.size for storage in self._storages.values() if storage.device is not None)

    def start_offload(self, span: AbstractContextManager[None] | None = None) -> None:
        """Start to copy every storage to host memory, after the work launched so far on the compute stream."""
        with on_copy_stream(self._memory.offload_stream), span or nullcontext():
            for storage in self._storages.values():
                assert storage.device is not None
                storage.host = self._memory.acquire(storage.size)
                storage.host.copy_(storage.device, non_blocking=True)
            self._offloaded = record_event(self._memory.offload_stream)

    def free_device_memory(self) -> None:
        """Make the compute stream wait for the copies to host memory, and free the device memory."""
        wait_for_event(self._offloaded)
        for storage in self._storages.values():
            storage.device = None

    def start_fetch(self, span: AbstractContextManager[None] | None = None) -> None:
        """Start to copy every storage back; the copies overlap with later work of the compute stream."""
        for storage in self._storages.values():
            storage.device = torch.empty(storage.size, dtype=torch.uint8, device=self._memory.device)
        # The copies start after the compute launched so far: it may still read freed tensors whose memory the allocation above reuses.
        with on_copy_stream(self._memory.fetch_stream), span or nullcontext():
            for storage in self._storages.values():
                assert storage.device is not None and storage.host is not None
                storage.device.copy_(storage.host, non_blocking=True)
            self._fetched = record_event(self._memory.fetch_stream)

    def wait_for_fetch(self) -> None:
        """Make the compute stream wait for the copies back."""
        wait_for_event(self._fetched)

    def release_buffers(self) -> None:
        """Return the host buffers, once the backward has been launched."""
        for storage in self._storages.values():
            if storage.host is not None:
                self._memory.release(storage.host, self._fetched)
        self._storages.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        untyped = tensor.untyped_storage()
        address = untyped.data_ptr()
        size = untyped.nbytes()
        can_offload = (
            tensor.is_floating_point()
            and tensor.device.type == self._memory.device.type
            and address not in self._excluded
        )
        if not can_offload or size < self._memory.min_bytes:
            return tensor
        storage = self._storages.get(address)
        if storage is None:
            as_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(untyped, 0, (size,), (1,))
            storage = self._storages[address] = _Storage(size, as_bytes)
        storage.unread += 1
        return _SavedTensor(storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _unpack(self, saved: Tensor | _SavedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        storage = saved.storage
        if storage.device is None:  # an autograd node reads the tensor a second time
            assert storage.host is not None
            storage.device = storage.host.to(self._memory.device, non_blocking=True)
        tensor = torch.empty(0, dtype=saved.dtype, device=self._memory.device)
        tensor.set_(storage.device.untyped_storage(), saved.offset, saved.shape, saved.stride)
        storage.unread -= 1
        if storage.unread <= 0:
            storage.device = None
        return tensor


def on_copy_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Context in which work runs on `stream`, after the work launched so far on the compute stream; on a CPU it has no effect."""
    if stream is None:
        return nullcontext()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    return torch.cuda.stream(stream)


def record_event(stream: torch.cuda.Stream | None) -> Any:
    """The event after the work launched so far on `stream`; None on a CPU."""
    return None if stream is None else stream.record_event()


def wait_for_event(event: Any) -> None:
    """Make the compute stream wait for an event; None: nothing to wait for."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def storage_addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    """The addresses of the storages of `tensors`."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def leaf_without_memory(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return an autograd leaf with the shape of x but without memory, and x as a function of this leaf.

    The gradient of x becomes the gradient of the leaf. An autograd graph references its leaves: if x itself were the leaf, its memory could
    not be freed before the backward.
    """
    leaf = x.new_empty(()).expand(x.shape).requires_grad_()
    return leaf, _LeafWithoutMemory.apply(leaf, x)


class _LeafWithoutMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor) -> Tensor:
        del ctx, leaf
        return x.detach()

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradient, None


class ActivationOffload:
    """Offloads the activations of one step's visits at the positions of the step's timetable.

    `computes`, `sizes` and `candidates` are the arguments of `build_timetable`. `concurrent_span(name, lane)` returns the profiler span
    of a copy, or None.
    """

    def __init__(
        self,
        memory: HostMemory | None,
        computes: Sequence[tuple[Visit, ...]],
        sizes: Mapping[Visit, float],
        candidates: Collection[Visit],
        concurrent_span: Callable[[str, str], AbstractContextManager[None] | None],
    ) -> None:
        self._memory = memory
        self._span_of = concurrent_span
        self._timetable = build_timetable(tuple(computes), tuple(sizes.items()), frozenset(candidates))
        self._index = -1
        self._saved: dict[Visit, SavedActivations] = {}

    def begin_compute(self) -> None:
        """Before the next forward or backward: free the device memory and start the copies back that the timetable lists for it."""
        self._index += 1
        for visit in self._timetable.frees.get(self._index, ()):
            self._saved[visit].free_device_memory()
        for visit in self._timetable.fetches.get(self._index, ()):
            self._saved[visit].start_fetch(self._span("fetch", visit))
        if self._memory is not None:
            device_bytes = sum(saved.device_bytes for saved in self._saved.values())
            self._memory.peak_device_bytes = max(self._memory.peak_device_bytes, device_bytes)

    def saved_activations(self, visit: Visit, excluded: Collection[int]) -> SavedActivations | None:
        """Return the collector for the tensors that the visit's forward saves; None if they are not offloaded.

        `excluded` has addresses of storages that stay on the device.
        """
        if visit not in self._timetable.offloaded:
            return None
        assert self._memory is not None, "a plan with offload has host memory"
        saved = self._saved[visit] = SavedActivations(self._memory, excluded)
        return saved

    def end_forward(self, visit: Visit) -> None:
        """Start to offload the tensors that the visit's forward saved."""
        if visit in self._saved:
            self._saved[visit].start_offload(self._span("offload", visit))

    @contextmanager
    def backward(self, visit: Visit) -> Iterator[None]:
        """Context of the visit's backward. It starts with a wait of compute for the copies back, and ends by releasing the host buffers."""
        saved = self._saved.get(visit)
        if saved is None:
            yield
            return
        saved.wait_for_fetch()
        yield
        saved.release_buffers()
        del self._saved[visit]

    def _span(self, name: str, visit: Visit) -> AbstractContextManager[None] | None:
        stage, micro_batch, unit = visit
        return self._span_of(f"{name} {stage}.{micro_batch}/{unit}", name)
