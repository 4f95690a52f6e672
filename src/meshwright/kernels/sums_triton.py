"""The Triton kernels of `sums`; imported only where there is a CUDA device, as CPU builds of torch come without Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
WARPS = 4
"""16 elements a thread: each load of four bytes an element is a vector, and several are under way."""


def fused_add(total: Tensor, part: Tensor) -> None:
    """See `sums.add`."""
    count = total.numel()
    _add_wide[(triton.cdiv(count, BLOCK),)](total, part, count, BLOCK, num_warps=WARPS)


def fused_scale(out: Tensor, part: Tensor, by: Tensor) -> None:
    """See `sums.scaled`."""
    count = out.numel()
    _scale[(triton.cdiv(count, BLOCK),)](out, part, by, count, BLOCK, num_warps=WARPS)


@triton.jit
def _add_wide(total, part, count, block: tl.constexpr) -> None:
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    old = tl.load(total + index, mask=inside).to(tl.float32)
    new = old + tl.load(part + index, mask=inside).to(tl.float32)
    tl.store(total + index, new.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _scale(out, part, by, count, block: tl.constexpr) -> None:
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    value = tl.load(part + index, mask=inside).to(tl.float32) * tl.load(by)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)
