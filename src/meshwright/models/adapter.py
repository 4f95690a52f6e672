"""Gives the linear layers of a decoder their adapters, and freezes all other weights."""

from __future__ import annotations

from torch import nn

from meshwright.kernels.adapter import Adapter, ExpertAdapter
from meshwright.kernels.linear import Linear
from meshwright.models.moe import Experts
from meshwright.spec.blocks.block import BlockSpec
from meshwright.spec.blocks.table import ExpertsOp, LinearOp
from meshwright.spec.model import ModelSpec, parameters


def add_adapters(model: nn.Module, spec: ModelSpec) -> None:
    """Add the adapters that `spec.adapter` describes to a decoder's linear layers. Then only the adapters are trained."""
    if spec.adapter is None:
        return
    for layer in range(spec.layers):
        _add_to_block(model.get_submodule(f"layers.{layer}"), spec.block(layer), spec.adapter.scale)
    trained = {parameter.name for parameter in parameters(spec) if parameter.trained}
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in trained)


def _add_to_block(block: nn.Module, spec: BlockSpec, scale: float) -> None:
    of_experts = [op for op in spec.table().operations if isinstance(op, ExpertsOp) and op.adapters]
    if of_experts:
        names = {op.name.rpartition(".")[2]: op for op in of_experts}
        experts = block.get_submodule(of_experts[0].name.rpartition(".")[0])
        assert isinstance(experts, Experts)
        parts = {name: op.adapters for name, op in names.items()}
        inputs = {name: op.inputs for name, op in names.items()}
        experts.adapter = ExpertAdapter(parts, of_experts[0].experts, inputs, scale)
    for op in spec.table().operations:
        if isinstance(op, LinearOp) and op.adapters:
            linear = block.get_submodule(op.name)
            assert isinstance(linear, Linear)
            fused = [(part.name, part.size) for part in op.parts]
            linear.adapter = Adapter(op.adapters, fused, op.inputs, scale, magnitudes=op.magnitudes)
