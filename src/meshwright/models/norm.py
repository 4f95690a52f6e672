"""Normalisation layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.kernels.norm import layer_norm, rms_norm


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with a bias."""

    def __init__(self, norm: str, width: int, eps: float, plain: bool) -> None:
        super().__init__()
        self.eps, self.plain = eps, plain
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, plain=self.plain)
        return layer_norm(x, self.weight, self.bias, self.eps, plain=self.plain)
