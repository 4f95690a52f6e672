"""The Triton kernels of `kernels.loss`. Import them only with a CUDA device, because CPU builds of torch lack Triton.

The gradient kernel moves 6 bytes per bf16 logit: one read for the logsumexp, then one read and one write for the
gradient. On an H200 it runs at memory bandwidth: 0.78 ms for 4,096 tokens of 128,256 logits. Processing fewer rows at a
time did not keep the logits in the L2 cache for the second read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Logits that a program loads at a time: 16 per thread."""
WARPS = 16
LOG2_E = tl.constexpr(1.4426950408889634)
"""log2(e). The device computes powers of two only."""
MIN_LOGIT = tl.constexpr(-1e30)
"""Lower than every logit. MIN_LOGIT - MIN_LOGIT is 0, but -inf - -inf would be NaN."""


def gradient_in_place(
    logits: Tensor, targets: Tensor, z_loss: float = 0.0, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the losses and the squared logsumexps of all rows, both `(tokens,)` in fp32, and put the gradient into `logits`.

    `logits` is `(tokens, vocab)`, `targets` `(tokens,)`; a negative target gives loss, square and gradient 0.
    `weights` `(tokens,)` in fp32 multiply the cross-entropy; None means 1. Without `z_loss` the squares are a scalar 0.

    The gradient is that of weight · cross-entropy + `z_loss` · logsumexp² for each row.
    """
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    squares = torch.empty_like(losses) if z_loss else losses.new_zeros(())
    _gradient[(rows,)](
        logits,
        targets,
        losses if weights is None else weights,
        losses,
        squares,
        columns,
        logits.stride(0),
        z_loss,
        weights is not None,
        z_loss > 0,
        BLOCK,
        num_warps=WARPS,
    )
    return losses, squares


def log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each target, `(tokens,)` in fp32; 0 where the target is negative.

    `logits` is `(tokens, vocab)`, `targets` `(tokens,)`. The bits of a row's result do not depend on the other rows.
    """
    rows, columns = logits.shape
    found = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _log_probability[(rows,)](logits, targets, found, columns, logits.stride(0), BLOCK, num_warps=WARPS)
    return found


@triton.jit
def _log_sum(start, columns, block: tl.constexpr) -> tl.tensor:
    """Return the logarithm to base 2 of the sum of exp(logit) over the row at `start`, `columns` logits."""
    # Each lane keeps its own maximum and sum (Milakov & Gimelshein 2018): a common maximum needs a reduction per block.
    maximum = tl.full([block], MIN_LOGIT, tl.float32)
    total = tl.zeros([block], tl.float32)
    for first in range(0, columns, block):
        position = first + tl.arange(0, block)
        x = tl.load(start + position, mask=position < columns, other=-float("inf")).to(tl.float32) * LOG2_E
        new_maximum = tl.maximum(maximum, x)
        total = total * tl.exp2(maximum - new_maximum) + tl.exp2(x - new_maximum)
        maximum = new_maximum
    row_maximum = tl.max(maximum, axis=0)
    return row_maximum + tl.log2(tl.sum(total * tl.exp2(maximum - row_maximum), axis=0))


@triton.jit
def _log_probability(logits, targets, found, columns, stride, block: tl.constexpr) -> None:
    """Compute the log-probability of one row's target."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    valid = target >= 0
    target_logit = tl.load(start + tl.where(valid, target, 0)).to(tl.float32)
    log_probability = target_logit - _log_sum(start, columns, block) / LOG2_E
    tl.store(found + row, tl.where(valid, log_probability, 0.0))


@triton.jit
def _gradient(
    logits,
    targets,
    weights,
    losses,
    squares,
    columns,
    stride,
    z_loss,
    weighted: tl.constexpr,
    has_z: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute the loss and the gradient of one row; the gradient replaces the logits.

    The gradient of a logit is softmax · factor - weight at the target, with factor = weight + 2 · z_loss · logsumexp.
    """
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    valid = target >= 0
    logsumexp = _log_sum(start, columns, block)
    target_logit = tl.load(start + tl.where(valid, target, 0)).to(tl.float32)
    loss = logsumexp / LOG2_E - target_logit
    weight = 1.0
    if weighted:
        weight = tl.load(weights + row)
        loss *= weight
    tl.store(losses + row, tl.where(valid, loss, 0.0))
    factor = weight
    if has_z:
        total_log = logsumexp / LOG2_E
        tl.store(squares + row, tl.where(valid, total_log * total_log, 0.0))
        factor += 2.0 * z_loss * total_log
    # All threads must read the target's logit before a thread overwrites it.
    tl.debug_barrier()
    for first in range(0, columns, block):
        position = first + tl.arange(0, block)
        inside = position < columns
        x = tl.load(start + position, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        gradient = tl.exp2(x * LOG2_E - logsumexp) * factor - tl.where(position == target, weight, 0.0)
        gradient = tl.where(valid, gradient, 0.0).to(logits.dtype.element_ty)
        tl.store(start + position, gradient, mask=inside, eviction_policy="evict_first")
