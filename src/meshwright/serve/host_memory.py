"""Host memory that is allocated page by page, when each page is first used."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def zeros(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On the CPU, the operating system allocates and clears each page when it is first
    written.

    `torch.zeros` would write the whole tensor: for a cache of several gigabytes that takes seconds, and it occupies
    memory that may never be used.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))
