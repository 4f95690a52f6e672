"""The Triton kernel of `pack`. Import it only with a CUDA device, because CPU builds of torch lack Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements that one program copies."""


def copy_rows(gradient: Tensor, out: Tensor, ranks: int, offset: int, rank_elements: int) -> int:
    """Copy the rows of `gradient` for each rank into `out`; return the number of copied elements per rank.

    `out` has `rank_elements` elements for each rank; the copy begins at the `offset`-th of them. Missing rows become zeros.
    """
    rows = triton.cdiv(gradient.shape[0], ranks)
    part = rows * gradient[0].numel() if rows else 0
    if part:
        _copy_rows[(triton.cdiv(part, BLOCK), ranks)](
            gradient, out, gradient.numel(), part, offset, rank_elements, BLOCK, num_warps=4
        )
    return part


@triton.jit
def _copy_rows(gradient, out, size, part, offset, rank_elements, block: tl.constexpr) -> None:
    """Copy BLOCK elements of one rank's part. Grid: (blocks of a part, ranks)."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    rank = tl.program_id(1).to(tl.int64)
    inside = index < part
    value = tl.load(gradient + rank * part + index, mask=inside & (rank * part + index < size), other=0.0)
    tl.store(out + rank * rank_elements + offset + index, value.to(out.dtype.element_ty), mask=inside)
