"""Copies of a step's numbers to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BUFFERS = 3
"""Pinned buffers that are used in turn: a step is prepared while the copies of the two before it may be under way."""


class CopyBuffer:
    """Copies arrays of int32 to the device in one piece; on a CPU it only concatenates them."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=cuda) for _ in range(BUFFERS if cuda else 1)]
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device) if cuda else self._hosts[0]
        self._arrays = [host.numpy() for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if cuda else []
        self._turn = 0
        self._views: tuple[list[int], list[Tensor]] = ([], [])
        """Sizes and views of the last parts, reused as most steps are decodes of as many requests as the step before."""

    def copy(self, arrays: Sequence[np.ndarray] | np.ndarray) -> list[Tensor]:
        """The arrays on the device, valid until the next call."""
        if self._copied:
            self._copied[self._turn].synchronize()
        sizes = [len(array) for array in arrays]
        used = sum(sizes)
        np.concatenate(arrays, out=self._arrays[self._turn][:used])
        if self._copied:
            self._device[:used].copy_(self._hosts[self._turn][:used], non_blocking=True)
            self._copied[self._turn].record()
            self._turn = (self._turn + 1) % BUFFERS
        return self.views(sizes)

    def views(self, sizes: Sequence[int]) -> list[Tensor]:
        """Consecutive parts of the buffer on the device."""
        sizes = list(sizes)
        if self._views[0] != sizes:
            self._views = sizes, list(self._device[: sum(sizes)].split(sizes))
        return self._views[1]
