"""Computes checksums of pieces of state (`checkpoint.write.checksum`) where the state is: on a GPU or in host memory.

On a device each piece takes one reduction. The reductions run on their own stream, at the same time as the copies. Only
the optimizer's update of a group waits for the sums of that group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.checkpoint.write.checksum import WORD_BYTES, Checksum, inner_words

NumberedPiece = tuple[int, Tensor]
"""A piece's position in the file, and the piece as bytes (uint8)."""
_SLOTS = 3
"""Three sums per piece: its incomplete first word, its complete words, and its incomplete last word."""


def host_checksum(source: Tensor) -> Checksum:
    """Return the checksum of bytes in host memory."""
    sums = torch.zeros(_SLOTS, dtype=torch.int64)
    for step in _steps(source, sums):
        step()
    return Checksum(_phase(source), int(sums.sum()))


class DeviceChecksums:
    """The checksums of pieces on a device. `groups` are the pieces of each group, in the order of the optimizer's update."""

    def __init__(self, groups: Sequence[Sequence[NumberedPiece]], device: torch.device) -> None:
        pieces = [piece for group in groups for piece in group]
        on_gpu = device.type == "cuda"
        self._sums = torch.zeros(len(pieces), _SLOTS, dtype=torch.int64, device=device)
        self._host_sums = torch.zeros(len(pieces), _SLOTS, dtype=torch.int64, pin_memory=on_gpu)
        self._phases = [(index, _phase(source)) for index, source in pieces]
        sums = iter(self._sums)
        self._groups = [[step for _, source in group for step in _steps(source, next(sums))] for group in groups]
        self._events: dict[int, torch.cuda.Event] = {}
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        # The first launch of a kernel loads it and allocates its buffers, which can synchronise with the device.
        self.start()
        for group in range(len(groups)):
            self.sum_group(group)
        self.copy_to_host()

    def start(self) -> None:
        """Let the next sums be those of the state after all work that the current stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def sum_group(self, group: int) -> None:
        """Start to compute the sums of a group."""
        with torch.cuda.stream(self._stream):
            for step in self._groups[group]:
                step()
            if self._stream is not None:
                self._events[group] = torch.cuda.Event()
                self._events[group].record()

    def wait(self, group: int) -> None:
        """Make the current stream wait for the sums of a group."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._events[group])

    def copy_to_host(self) -> None:
        """Copy all sums to the host. The current stream waits for the copy."""
        with torch.cuda.stream(self._stream):
            self._host_sums.copy_(self._sums, non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def result(self) -> dict[int, Checksum]:
        """Return the checksums by position in the file. The copy to the host must have ended."""
        totals = self._host_sums.sum(1).tolist()
        return {index: Checksum(phase, total) for (index, phase), total in zip(self._phases, totals, strict=True)}


def _phase(source: Tensor) -> int:
    return int(source.storage_offset()) % WORD_BYTES


def _steps(source: Tensor, sums: Tensor) -> list[Callable[[], object]]:
    """Return functions that write the three sums of `source` into `sums` `(3,)`.

    `sums` must be zero, or have the sums of an earlier call.
    """
    phase = _phase(source)
    first, last = inner_words(phase, source.numel())
    steps: list[Callable[[], object]] = []
    for data, slot, start in ((source[:first], sums[0:1], phase), (source[last:], sums[2:3], 0)):
        if data.numel():
            target = slot.view(torch.uint8)[start : start + data.numel()]
            steps.append(lambda target=target, data=data: target.copy_(data, non_blocking=True))
    if last > first:
        words = source[first:last].view(torch.int64)
        total = sums[1]
        steps.append(lambda: torch.sum(words, 0, out=total))
    return steps
