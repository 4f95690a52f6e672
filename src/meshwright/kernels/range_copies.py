"""Copies of memory ranges with checksums of the bytes read, for cache blocks in memory that another process owns.

Ranges are given by address, since a process that maps another's memory has no tensor of it. The sums are those of `checksum.digests`, so
that either side computes them alone. On CUDA one Triton kernel copies all ranges and computes their sums.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from meshwright.kernels.checksum import digests

ALIGNMENT = 16
"""Addresses and sizes of ranges are multiples of it, so that each thread copies 16 bytes at a time."""


def copy_ranges(ranges: Tensor, device: torch.device) -> Tensor:
    """Copy all ranges after the earlier work of the device's stream; both sums of each, int64 `(ranges, 2)` on `device`.

    `ranges` `(ranges, 3)`, int64 on the CPU, has the address, the address of the copy, and the number of bytes of each; without a copy,
    that address is 0. Addresses are of the memory of `device` or of memory that it maps. The caller makes sure that the ranges are there
    and that no copy overlaps another range. The host does not wait for the device.
    """
    assert not (ranges % ALIGNMENT).any(), "addresses and sizes are aligned"
    if device.type == "cuda":
        from meshwright.kernels.range_copies_triton import fused_copy

        return fused_copy(ranges, device)
    for source, target, size in ranges.tolist():
        if target:
            ctypes.memmove(target, source, size)
    return digests([_bytes_at(source, size) for source, _, size in ranges.tolist()])


def _bytes_at(address: int, size: int) -> Tensor:
    """Host memory as a tensor."""
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
