"""Copies memory ranges and computes checksums of the bytes read, for cache blocks in memory that another process owns.

Ranges are given by address, because a process that maps another process's memory has no tensor of it. The checksums are
those of `checksum.digests`, so that either process can compute them alone. On CUDA one Triton kernel copies all ranges and
computes their checksums.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from meshwright.kernels.checksum import digests

ALIGNMENT = 16
"""Addresses and sizes of ranges must be multiples of this many bytes, so that each thread copies 16 bytes at a time."""


def copy_ranges(ranges: Tensor, device: torch.device) -> Tensor:
    """Copy all ranges after earlier work of the device's stream, and return both checksums of each range.

    `ranges` `(ranges, 3)`, int64 on the CPU: source address, target address, and number of bytes. A target address of 0
    means that the range is only read. Addresses belong to memory of `device`, or to memory that it maps.

    The result is int64 `(ranges, 2)` on `device`. The caller ensures that the addresses are valid, and that no target
    overlaps another range. The host does not wait for the device.
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
    """Return `size` bytes of host memory at `address` as a tensor, without a copy."""
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
