"""Feed-forward networks: gated, or with GELU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.gated import gated_mlp
from meshwright.kernels.linear import Linear
from meshwright.kernels.swiglu import gated_activation
from meshwright.kernels.tiled_mlp import tiled_mlp
from meshwright.spec.blocks.feed_forward import FeedForwardSpec


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate) · up), or GeGLU: down(gelu(gate) · up).

    With `reference` it uses the kernels' reference implementations, which have PyTorch operators only.
    """

    tile: int = 0
    """Number of tokens that are computed at a time in training; 0: all together."""

    def __init__(self, spec: FeedForwardSpec, hidden: int, reference: bool) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gelu = spec.activation == "geglu"
        self.reference = reference
        self.gate_up = Linear(hidden, spec.first_width, bias=spec.bias)
        self.down = Linear(spec.width, hidden, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.tile:
            return tiled_mlp(
                x, self.gate_up, self.down, self.tile, activation=self.activation, reference=self.reference
            )
        return gated_mlp(x, self.gate_up, self.down, gelu=self.gelu, reference=self.reference)

    def activate(self, projected: Tensor) -> Tensor:
        """Return the gated activation of `projected`, the output of `gate_up`."""
        return gated_activation(projected, gelu=self.gelu, reference=self.reference)


class MLP(nn.Module):
    """down(gelu(up)), with GPT-2's tanh approximation."""

    tile: int = 0
    """Number of tokens that are computed at a time in training; 0: all together."""

    def __init__(self, spec: FeedForwardSpec, hidden: int) -> None:
        super().__init__()
        self.up = Linear(hidden, spec.width, bias=spec.bias)
        self.down = Linear(spec.width, hidden, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.tile:
            return tiled_mlp(x, self.up, self.down, self.tile, activation="gelu", reference=False)
        return self.down(self.activate(self.up(x)))

    def activate(self, projected: Tensor) -> Tensor:
        """Return gelu of `projected`, the output of `up`."""
        return F.gelu(projected, approximate="tanh")


def feed_forward_of(spec: FeedForwardSpec, hidden: int, reference: bool) -> GatedMLP | MLP:
    """Return the feed-forward network that `spec` describes, for a residual stream of width `hidden`.

    `reference` is passed to `GatedMLP`. An `MLP` has no kernels of ours.
    """
    return GatedMLP(spec, hidden, reference) if spec.gated else MLP(spec, hidden)
