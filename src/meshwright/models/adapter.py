"""Gives the linear layers of a decoder their adapters, and freezes all other weights."""

from __future__ import annotations

from torch import nn

from meshwright.kernels.adapter import Adapter
from meshwright.kernels.linear import Linear
from meshwright.spec.blocks.block import BlockSpec
from meshwright.spec.blocks.table import LinearOp
from meshwright.spec.model import ModelSpec, parameters


def add_adapters(model: nn.Module, spec: ModelSpec) -> None:
    """Add the adapters that `spec.adapter` describes to a decoder's linear layers; only they are trained then."""
    if spec.adapter is None:
        return
    for layer in range(spec.layers):
        _add_to_block(model.get_submodule(f"layers.{layer}"), spec.block(layer), spec.adapter.scale)
    trained = {parameter.name for parameter in parameters(spec) if parameter.trained}
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in trained)


def _add_to_block(block: nn.Module, spec: BlockSpec, scale: float) -> None:
    for op in spec.table().operations:
        if isinstance(op, LinearOp) and op.adapters:
            linear = block.get_submodule(op.name)
            assert isinstance(linear, Linear)
            fused = [(part.name, part.size) for part in op.parts]
            linear.adapter = Adapter(op.adapters, fused, op.inputs, scale, magnitudes=op.magnitudes)
