"""A buffer that copies the arrays of a step to the device. The host does not wait for the copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BUFFERS = 3
"""Number of pinned buffers on the host, which steps use in turn. While a step is prepared, copies of two earlier steps may be running."""


class CopyBuffer:
    """Copies several int32 arrays to the device in one copy. On a CPU it only concatenates them. It has room for `capacity` values."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=cuda) for _ in range(BUFFERS if cuda else 1)]
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device) if cuda else self._hosts[0]
        self._arrays = [host.numpy() for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if cuda else []
        self._turn = 0
        self._views: tuple[list[int], list[Tensor]] = ([], [])
        """Sizes and result of the last call of `views`. They are reused, because most steps have the same sizes as the step before."""

    def copy(self, arrays: Sequence[np.ndarray] | np.ndarray) -> list[Tensor]:
        """Copy the arrays to the device. Returns them there, in order, valid until the next call."""
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
        """Return consecutive parts of the device's buffer, from its beginning on. `sizes` has the number of values of each part."""
        sizes = list(sizes)
        if self._views[0] != sizes:
            self._views = sizes, list(self._device[: sum(sizes)].split(sizes))
        return self._views[1]
