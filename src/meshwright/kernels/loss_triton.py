"""The Triton kernel of `kernels.loss`; imported only with a CUDA device, as CPU builds of torch lack Triton.

6 bytes per logit in bf16: read for the log-sum, read again and overwritten for the gradient. On an H200 it runs at
memory bandwidth, 0.78 ms for 4,096 tokens of 128,256 logits; processing fewer rows at a time did not keep the second
read in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Logits that one program has in its registers: 16 a thread."""
WARPS = 16
PER_LOG2 = tl.constexpr(1.4426950408889634)
"""Factor from natural to binary exponents, which the device computes."""
LOWEST = tl.constexpr(-1e30)
"""Below every logit; unlike minus infinity it can be subtracted from itself."""


def slope_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each row of logits `(tokens, vocab)` in fp32, 0 for a negative target.

    The gradient replaces the logits.
    """
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _slope[(rows,)](logits, targets, losses, columns, logits.stride(0), BLOCK, num_warps=WARPS)
    return losses


@triton.jit
def _slope(logits, targets, losses, columns, stride, block: tl.constexpr) -> None:
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    counts = target >= 0
    # Every lane has a largest logit and a sum of its own (Milakov & Gimelshein 2018): one for all would be waited for at each block.
    top = tl.full([block], LOWEST, tl.float32)
    total = tl.zeros([block], tl.float32)
    for first in range(0, columns, block):
        place = first + tl.arange(0, block)
        x = tl.load(start + place, mask=place < columns, other=-float("inf")).to(tl.float32) * PER_LOG2
        peak = tl.maximum(top, x)
        total = total * tl.exp2(top - peak) + tl.exp2(x - peak)
        top = peak
    peak = tl.max(top, axis=0)
    log_sum = peak + tl.log2(tl.sum(total * tl.exp2(top - peak), axis=0))
    picked = tl.load(start + tl.where(counts, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counts, log_sum / PER_LOG2 - picked, 0.0))
    # Every thread has read the target's logit before any writes over it.
    tl.debug_barrier()
    for first in range(0, columns, block):
        place = first + tl.arange(0, block)
        inside = place < columns
        x = tl.load(start + place, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        slope = tl.exp2(x * PER_LOG2 - log_sum) - tl.where(place == target, 1.0, 0.0)
        slope = tl.where(counts, slope, 0.0).to(logits.dtype.element_ty)
        tl.store(start + place, slope, mask=inside, eviction_policy="evict_first")
