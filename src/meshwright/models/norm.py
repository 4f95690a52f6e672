"""Normalisation layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.kernels.norm import layer_norm, rms_norm
from meshwright.spec.blocks.norm import NormSpec


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with a bias.

    With `plus_one` the stored weight is the factor of RMSNorm minus one. With `reference` the norm is computed step by step with PyTorch's
    operators.
    """

    kernel: bool = True
    """Whether our kernel may be used for rows without gradients; passed to `kernels.norm.rms_norm`."""

    def __init__(self, spec: NormSpec, width: int, reference: bool) -> None:
        super().__init__()
        self.eps = spec.eps
        self.plus_one = spec.plus_one
        self.reference = reference
        self.weight = nn.Parameter(torch.zeros(width) if spec.plus_one else torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if spec.kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(
                x, self.weight, self.eps, plus_one=self.plus_one, reference=self.reference, kernel=self.kernel
            )
        return layer_norm(x, self.weight, self.bias, self.eps, reference=self.reference)
