"""SwiGLU, GeGLU and gpt-oss's clamped SwiGLU of a fused projection (Shazeer 2020), in one pass over memory in forward and in backward.

Compiled, the plain form's backward writes both halves of one buffer through a select that reads every input twice: 1.16 ms for
16,384 tokens of Llama-3-8B on an H200. The Triton kernel of the fast path takes 0.54 ms. Forward takes the same time with both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_activation(
    gate_up: Tensor, weights: Tensor | None = None, *, gelu: bool = False, reference: bool = False
) -> Tensor:
    """Return silu(gate) · up, `(…, width)`, of `gate_up` `(…, 2·width)`, which has the gates first.

    With `gelu` it is gelu(gate) · up, with the tanh approximation of GELU.

    Each row is multiplied by its element of `weights` `(…,)`, if there are any. On CUDA in bf16, fp16 or fp32 a Triton kernel computes in
    fp32 and rounds once; elsewhere, and with `reference`, torch's own operators.
    """
    if gate_up.is_cuda and gate_up.element_size() <= 4 and not reference:
        from meshwright.kernels.swiglu_triton import fused_gated_activation

        return fused_gated_activation(gate_up, weights, gelu)
    gate, up = gate_up.chunk(2, dim=-1)
    activation = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    return activation if weights is None else (activation * weights[..., None]).to(gate_up.dtype)


CLAMP = 7.0
"""gpt-oss's bound of gates and ups."""
SLOPE = 1.702
"""gpt-oss's factor inside the sigmoid, which makes x · sigmoid(SLOPE · x) like GELU."""


def clamped_activation(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return gate · σ(1.702 · gate) · (up + 1), `(…, width)`, where gates are at most 7 and ups are between -7 and 7.

    `gate_up` `(…, 2·width)` has the gates first; each row is multiplied by its element of `weights` `(…,)`, if there are any.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=CLAMP)
    activation = gate * torch.sigmoid(SLOPE * gate) * (up.clamp(-CLAMP, CLAMP) + 1)
    return activation if weights is None else (activation * weights[..., None]).to(gate_up.dtype)
