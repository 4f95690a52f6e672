"""The Triton kernels of `sums`. Import them only with a CUDA device, because CPU builds of torch lack Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Elements that one program computes."""
WARPS = 4
"""Warps of a program. Each thread has 16 elements, so that loads are vectors and several are in flight."""


def fused_add(total: Tensor, addend: Tensor) -> None:
    """Add `addend` to `total` in place, in fp32; see `sums.add`."""
    count = total.numel()
    _add_wide[(triton.cdiv(count, BLOCK),)](total, addend, count, BLOCK, num_warps=WARPS)


def fused_scale(out: Tensor, x: Tensor, factor: Tensor) -> None:
    """Write x · factor to `out`; see `sums.scale`."""
    count = out.numel()
    _scale[(triton.cdiv(count, BLOCK),)](out, x, factor, count, BLOCK, num_warps=WARPS)


@triton.jit
def _add_wide(total, addend, count, block: tl.constexpr) -> None:
    """Add BLOCK elements in fp32."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    old = tl.load(total + index, mask=inside).to(tl.float32)
    new = old + tl.load(addend + index, mask=inside).to(tl.float32)
    tl.store(total + index, new.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _scale(out, x, factor, count, block: tl.constexpr) -> None:
    """Scale BLOCK elements in fp32."""
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = index < count
    value = tl.load(x + index, mask=inside).to(tl.float32) * tl.load(factor)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)
