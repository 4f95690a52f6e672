"""Sum of a residual stream and a branch's output, and the RMSNorm of that sum, in one kernel for inference on CUDA.

At one token the two operators of torch are mostly launch and memory latency, and the second reads what the first has written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels.norm import KERNEL_WIDTHS, rms_norm

MAX_WIDTH = KERNEL_WIDTHS[-1]
"""Widest token that one program holds in registers."""


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, plain: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `x + delta` and its RMSNorm over the last dimension, both shaped like x `(…, width)`; `plus_one` as in `rms_norm`.

    The norm is that of the sum rounded to the dtype of x, as with separate operators. These compute with `plain`, on other devices than
    CUDA, with gradients, beyond MAX_WIDTH, and for fp64 or unequal dtypes; otherwise a Triton kernel does.
    """
    if not plain and _runs_kernel(x, delta, weight):
        from meshwright.kernels.add_norm_triton import fused_add_rms_norm

        return fused_add_rms_norm(x, delta, weight, eps, plus_one=plus_one)
    total = x + delta
    return total, rms_norm(total, weight, eps, plus_one=plus_one, plain=plain)


def add_copies_rms_norm(
    x: Tensor,
    copies: Tensor,
    shared: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    plain: bool = False,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of x `(1, tokens, width)` and the output of an MoE layer, whose summands are given.

    `copies` `(tokens, copies, width)` are the experts' outputs of each token, `shared` `(1, tokens, width)` that of the shared expert, if
    there is one. Each sum is rounded to the dtype of x, as with separate operators.
    """
    if not plain and copies.dtype == x.dtype and _runs_kernel(x, x if shared is None else shared, weight):
        from meshwright.kernels.add_norm_triton import fused_add_copies_rms_norm

        return fused_add_copies_rms_norm(x, copies, shared, weight, eps, plus_one=plus_one)
    delta = copies.sum(1).view_as(x)
    delta = delta if shared is None else delta + shared
    return add_rms_norm(x, delta, weight, eps, plus_one=plus_one, plain=plain)


def _runs_kernel(x: Tensor, delta: Tensor, weight: Tensor) -> bool:
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, delta, weight))
    equal_dtypes = x.dtype == delta.dtype == weight.dtype and x.element_size() <= 4
    return x.is_cuda and equal_dtypes and x.shape == delta.shape and x.shape[-1] <= MAX_WIDTH and not differentiated
