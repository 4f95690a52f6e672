"""The Triton kernel of `range_copies.copy_ranges`. Import it only where it runs, because CPU builds of torch lack Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.checksum import COLUMNS

TILES = 8
"""Number of tiles, of `COLUMNS` words each, that one program copies."""
WORD_BYTES = 8


def fused_copy(ranges: Tensor, device: torch.device) -> Tensor:
    """Copy ranges and return their checksums; see `range_copies.copy_ranges`."""
    sums = torch.zeros(len(ranges), 2, dtype=torch.int64, device=device)
    programs = triton.cdiv(int(ranges[:, 2].max()), TILES * COLUMNS * WORD_BYTES)
    if device.type == "cuda":
        ranges = ranges.pin_memory().to(device, non_blocking=True)
    with torch.cuda.device(device if device.type == "cuda" else -1):
        _copy_ranges[(len(ranges), programs)](ranges, sums, COLUMNS=COLUMNS, TILES=TILES, num_warps=4)
    return sums


@triton.jit
def _copy_ranges(ranges, sums, COLUMNS: tl.constexpr, TILES: tl.constexpr) -> None:
    """Copy one part of one range, and add its words to the checksums. Grid: (ranges, parts of the longest range)."""
    index = tl.program_id(0)
    part = tl.program_id(1)
    # The compiler must know that the pointers and the word counts are aligned; otherwise each load has only 8 bytes.
    source = tl.multiple_of(tl.load(ranges + index * 3).to(tl.pointer_type(tl.int64)), 16)
    address = tl.load(ranges + index * 3 + 1)
    target = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    words = tl.multiple_of(tl.load(ranges + index * 3 + 2) // 8, 2)
    column = tl.arange(0, COLUMNS)
    columns = tl.zeros((COLUMNS,), dtype=tl.int64)
    first = part.to(tl.int64) * (TILES * COLUMNS)
    for tile in range(TILES):
        word = first + tile * COLUMNS + column
        content = tl.load(source + word, mask=word < words, other=0)
        tl.store(target + word, content, mask=(word < words) & (address != 0))
        columns += content
    if first < words:
        tl.atomic_add(sums + index * 2, tl.sum(columns), sem="relaxed")
        tl.atomic_add(sums + index * 2 + 1, tl.sum(columns * (2 * column + 1)), sem="relaxed")
