"""The Triton kernel behind `kernels.loss`; imported only where there is a CUDA device, as CPU builds of torch come without Triton.

A row of logits is read from memory once: the second look at it finds it in the L2 cache, because no more rows are in work than fit there.
4 bytes a logit in bf16, where a reduction over all rows followed by a pass over them moves 6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Logits that one program has in its registers."""
WARPS = 32
"""A whole multiprocessor's worth for two rows, so that few rows are in work at a time."""


def slope_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each row of logits `(tokens, vocab)` in fp32, 0 where the target is negative; its gradient replaces the logits."""
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    programs = min(rows, torch.cuda.get_device_properties(logits.device).multi_processor_count)
    _slope[(programs,)](logits, targets, losses, rows, columns, logits.stride(0), BLOCK, num_warps=WARPS)
    return losses


@triton.jit
def _slope(logits, targets, losses, rows, columns, stride, block: tl.constexpr) -> None:
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        start = logits + tl.cast(row, tl.int64) * stride
        target = tl.load(targets + row)
        counts = target >= 0
        top = tl.full((), -float("inf"), tl.float32)
        total = tl.zeros([block], tl.float32)
        for first in range(0, columns, block):
            place = first + tl.arange(0, block)
            x = tl.load(start + place, mask=place < columns, other=-float("inf"), eviction_policy="evict_last")
            x = x.to(tl.float32)
            peak = tl.maximum(top, tl.max(x, axis=0))
            total = total * tl.exp(top - peak) + tl.exp(x - peak)
            top = peak
        log_sum = top + tl.log(tl.sum(total, axis=0))
        picked = tl.load(start + tl.where(counts, target, 0)).to(tl.float32)
        tl.store(losses + row, tl.where(counts, log_sum - picked, 0.0))
        # Every thread has read the target's logit before any writes over it.
        tl.debug_barrier()
        for first in range(0, columns, block):
            place = first + tl.arange(0, block)
            inside = place < columns
            x = tl.load(start + place, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            slope = tl.exp(x - log_sum) - tl.where(place == target, 1.0, 0.0)
            slope = tl.where(counts, slope, 0.0).to(logits.dtype.element_ty)
            tl.store(start + place, slope, mask=inside, eviction_policy="evict_first")
