"""The state of an optimizer in host memory at one step, which a snapshot reads while the next step runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.optim.chunk_memory import ChunkMemory, RoundedOf


@dataclass
class SecondBuffers:
    """Host memory to which steps write while a snapshot is copied.

    `records` receives the results of the step. `on_device` has a copy of the records on the device, followed by the rounded weights by
    position.
    """

    records: Tensor
    on_device: Tensor


class HostBuffers:
    """The state after an update, as a `HostState`. State on the device is in `copied`; if that is None, it is read from the device."""

    def __init__(
        self,
        memory: ChunkMemory,
        records: Tensor,
        copied: Tensor | None,
        rounded_of: RoundedOf,
        wait: Callable[[], object],
    ) -> None:
        self._memory = memory
        self._records = records
        self._copied = copied
        self._rounded_of = rounded_of
        self._wait = wait
        self._stream: torch.cuda.Stream | None = None
        if copied is None and memory.device_records.is_cuda:
            self._stream = torch.cuda.Stream(memory.device_records.device)
            self._stream.wait_stream(torch.cuda.current_stream(memory.device_records.device))

    def wait(self) -> None:
        """See `HostState`."""
        self._wait()

    def current(self, memory: Tensor) -> Tensor:
        """See `HostState`. Memory that is not encoded is returned unchanged."""
        if not memory.is_meta:
            return memory
        dtype = self._memory.packing.stored
        state, start = self._memory.locate(int(memory.storage_offset()) // dtype.itemsize)
        with torch.cuda.stream(self._stream):
            values = self._memory.read(state, start, memory.numel() // dtype.itemsize, self._record, self._rounded)
        return values.to(dtype).view(torch.uint8)

    def _record(self, number: int) -> Tensor:
        if number >= self._memory.on_device:
            return self._records[self._memory.slices[number]]
        return self._memory.record(number) if self._copied is None else self._copied[self._memory.slices[number]]

    def _rounded(self, start: int, count: int) -> Tensor:
        if self._copied is None:
            return self._rounded_of(start, count)
        first = self._memory.device_bytes + 2 * start
        return self._copied[first : first + 2 * count].view(torch.bfloat16)
