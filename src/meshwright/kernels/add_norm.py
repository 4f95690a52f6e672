"""Adds a branch's output to the residual stream and computes the RMSNorm of the sum, in one kernel for inference on CUDA.

With one token, torch's two operators take mostly launch and memory latency, and the second operator reads what the first
one has just written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels.norm import KERNEL_WIDTHS, rms_norm

MAX_WIDTH = KERNEL_WIDTHS[-1]
"""Largest width of a token that one program holds in registers."""


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False, reference: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `x + delta` and its RMSNorm over the last dimension, both shaped like x `(…, width)`.

    The sum is rounded to the dtype of x before the norm, as with separate operators. `weight` is `(width,)`; `eps` and
    `plus_one` are those of `norm.rms_norm`.

    A Triton kernel runs on CUDA. The separate operators run with `reference`, on other devices, with gradients, for widths
    above MAX_WIDTH, in fp64, and if the dtypes or shapes differ.
    """
    if not reference and _runs_kernel(x, delta, weight):
        from meshwright.kernels.add_norm_triton import fused_add_rms_norm

        return fused_add_rms_norm(x, delta, weight, eps, plus_one=plus_one)
    total = x + delta
    return total, rms_norm(total, weight, eps, plus_one=plus_one, reference=reference)


def add_copies_rms_norm(
    x: Tensor,
    copies: Tensor,
    shared: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    reference: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return x plus the output of an MoE layer, and the RMSNorm of this sum; both `(1, tokens, width)` like x.

    The output of the MoE layer is given by its summands: `copies` `(tokens, top_k, width)` are the outputs of each token's
    experts, and `shared` `(1, tokens, width)` is the output of the shared expert, if there is one. Each sum is rounded to
    the dtype of x, as with separate operators. The other arguments are those of `add_rms_norm`.
    """
    if not reference and copies.dtype == x.dtype and _runs_kernel(x, x if shared is None else shared, weight):
        from meshwright.kernels.add_norm_triton import fused_add_copies_rms_norm

        return fused_add_copies_rms_norm(x, copies, shared, weight, eps, plus_one=plus_one)
    delta = copies.sum(1).view_as(x)
    delta = delta if shared is None else delta + shared
    return add_rms_norm(x, delta, weight, eps, plus_one=plus_one, reference=reference)


def _runs_kernel(x: Tensor, delta: Tensor, weight: Tensor) -> bool:
    """Return whether the Triton kernel can compute `add_rms_norm` of these tensors."""
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, delta, weight))
    equal_dtypes = x.dtype == delta.dtype == weight.dtype and x.element_size() <= 4
    return x.is_cuda and equal_dtypes and x.shape == delta.shape and x.shape[-1] <= MAX_WIDTH and not differentiated
