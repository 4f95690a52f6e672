"""Keeps gradient sums over micro-batches in host memory while their unit does not compute (`plan.accumulation: host`).

A unit is a part of the model whose parameters are gathered and reduced together: the embedding, a block, or the head.

After each reduction except the step's last, the storages of the unit's gradient shards are copied to the host and freed. Before the next
action that adds to these gradients, the storages are allocated and copied back. Every addition therefore runs on the device as without
offload, and the sums have the same bits. Copies run on two streams, one for each direction, and overlap with the compute of one
neighbouring unit.

Streams wait for events; the host does not wait. Memory is freed when the compute stream has waited for the copy that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.offload import HostMemory, on_copy_stream, record_event, wait_for_event
from meshwright.parallel.sharded_unit import ShardedUnit

SpanOf = Callable[[str, str], AbstractContextManager[None] | None]
"""A function that returns the profiler span of a copy, given its name and its lane in the timeline, or None."""


class GradientOffload:
    """Moves the gradient sums of a step's FSDP units between device and host memory.

    The step consists of compute actions, in order; they are counted from 0. `additions[i]` has the units to whose gradients action i adds.
    """

    def __init__(self, memory: HostMemory, additions: Sequence[Sequence[ShardedUnit]], span_of: SpanOf) -> None:
        self._memory = memory
        self._additions = additions
        self._span_of = span_of
        self._position = -1
        self._on_host: dict[ShardedUnit, list[tuple[torch.UntypedStorage, Tensor]]] = {}
        self._fetches: dict[ShardedUnit, Any] = {}
        """The units that are copied back to the device. The value is the event at the end of the copy, for which compute must wait before
        it adds to the gradients; None on a CPU."""
        self._sends: dict[ShardedUnit, tuple[int, Any]] = {}
        """The units whose copies to the host have begun and whose device memory is not freed yet. The value is the number of the compute
        action after which the copy began, and the event at the end of the copy."""

    def begin_compute(self) -> None:
        """Call this before each compute action.

        It frees the device memory of sums whose copies to the host began before the previous action. It starts to copy back the sums to
        which this action or the next one adds.
        """
        self._position += 1
        for unit in [unit for unit, (position, _) in self._sends.items() if position < self._position - 1]:
            self._free(unit)
        for unit in self._units(self._position):
            self.ensure_on_device(unit)
        for unit in self._units(self._position + 1):
            self._fetch(unit)

    def send(self, unit: ShardedUnit) -> None:
        """After a unit's reduction, start to copy its sums to the host. Does nothing if nothing was added since the last copy."""
        if unit in self._on_host:
            return
        storages = {
            shard.untyped_storage().data_ptr(): shard.untyped_storage()
            for shard in unit.gradient_shards
            if shard.numel()
        }
        stream = self._memory.offload_stream
        with on_copy_stream(stream), self._span_of("offload gradients", "offload") or nullcontext():
            copies = []
            for event in unit.reduced_events:
                assert stream is not None, "a CPU has no events"
                stream.wait_event(event)
            for storage in storages.values():
                buffer = self._memory.acquire(storage.nbytes())
                buffer.copy_(_bytes_of(storage, self._memory.device), non_blocking=True)
                copies.append((storage, buffer))
        self._on_host[unit] = copies
        self._sends[unit] = self._position, record_event(stream)

    def ensure_on_device(self, unit: ShardedUnit) -> None:
        """Make the compute stream wait until the unit's sums are on the device and may be changed."""
        self._fetch(unit)
        if unit in self._fetches:
            wait_for_event(self._fetches.pop(unit))

    def _units(self, position: int) -> Sequence[ShardedUnit]:
        return self._additions[position] if position < len(self._additions) else ()

    def _free(self, unit: ShardedUnit) -> None:
        wait_for_event(self._sends.pop(unit)[1])
        for storage, _ in self._on_host[unit]:
            storage.resize_(0)

    def _fetch(self, unit: ShardedUnit) -> None:
        """Start to copy the unit's sums back. If their device memory is not freed yet, only forget the copy in host memory."""
        copies = self._on_host.pop(unit, None)
        if copies is None:
            return
        if unit in self._sends:
            self._fetches[unit] = self._sends.pop(unit)[1]
        else:
            self._fetches[unit] = self._start_copies_back(copies)
        for _, buffer in copies:
            self._memory.release(buffer, self._fetches[unit])

    def _start_copies_back(self, copies: Sequence[tuple[torch.UntypedStorage, Tensor]]) -> Any:
        """Allocate the storages and start to fill them. Returns the event at the end of the copies (None on a CPU)."""
        for storage, buffer in copies:
            storage.resize_(buffer.numel())
        # The copies start after the compute launched so far: it may still read freed tensors whose memory the storages reuse.
        stream = self._memory.fetch_stream
        with on_copy_stream(stream), self._span_of("fetch gradients", "fetch") or nullcontext():
            for storage, buffer in copies:
                _bytes_of(storage, self._memory.device).copy_(buffer, non_blocking=True)
        return record_event(stream)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
