"""The Triton kernel of `pack`; imported only where there is a CUDA device, as CPU builds of torch come without Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def lay(gradient: Tensor, into: Tensor, ranks: int, offset: int, whole: int) -> int:
    """Copy each rank's rows to `offset` of its `whole` elements; returns how many of these they take."""
    rows = triton.cdiv(gradient.shape[0], ranks)
    part = rows * gradient[0].numel() if rows else 0
    if part:
        _lay[(triton.cdiv(part, BLOCK), ranks)](
            gradient, into, gradient.numel(), part, offset, whole, BLOCK, num_warps=4
        )
    return part


@triton.jit
def _lay(gradient, into, size, part, offset, whole, block: tl.constexpr) -> None:
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    rank = tl.program_id(1).to(tl.int64)
    here = index < part
    value = tl.load(gradient + rank * part + index, mask=here & (rank * part + index < size), other=0.0)
    tl.store(into + rank * whole + offset + index, value.to(into.dtype.element_ty), mask=here)
