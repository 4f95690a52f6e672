"""Applies a plan's fp8 settings to a model: fp8 matmuls of linear layers, and scales of weights that are gathered in fp8.

The scale of a weight depends on its largest magnitude over all ranks that shard it. Once per step, before the first gather, each rank
computes the largest magnitude of each of its shards, and one all-reduce takes the maxima over ranks. A gather then needs no collective for
its scale. (torchao, which introduced this method for FSDP2, calls it precomputed scales.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.kernels.assembler import VARIABLE
from meshwright.kernels.fp8_matmuls import E4M3, Fp8Matrix, Scaling, inverse, round_with_scale, scale_of
from meshwright.kernels.gated import find_miscompiled_kernel
from meshwright.kernels.grouped_fp8 import GROUPED_MAJOR
from meshwright.kernels.linear import Linear
from meshwright.models.decoder import Decoder
from meshwright.models.moe import Experts, MoELayer
from meshwright.parallel.blocks import blocks_with_layer
from meshwright.parallel.sharded_unit import ShardedUnit
from meshwright.spec.errors import BadInput
from meshwright.spec.plan import Plan
from meshwright.spec.plan_rules import untrained

CAPABILITY = (8, 9)
"""Lowest CUDA compute capability with fp8 matmuls: Ada; Hopper has 9.0."""
READ_ELEMENTS = 1 << 26
"""Number of elements of a frozen weight that are read into memory at a time to be rounded."""
SCALE_STRIDE = 4
"""Distance from one scale to the next, in fp32 elements: compiled code copies inputs that are not aligned to 16 bytes."""


def use_fp8_matmuls(model: Decoder, plan: Plan, device: torch.device) -> None:
    """Make the linear layers of a block multiply in fp8 if the plan has fp8 for the block's layer.

    The router of an MoE layer stays in the compute dtype. The rows of its experts have one scale each in both fp8 formats
    (`kernels.grouped_fp8`). The block of a prediction module has the format of the last layer; its projection stays in the compute dtype.

    Raises BadInput on a GPU that cannot multiply in fp8. On a CPU the rounded values are multiplied in fp32.
    """
    formats = {layer: plan.linear(layer, model.spec.layers) for layer, _ in blocks_with_layer(model)}
    if any(number_format != "compute" for number_format in formats.values()):
        if refused := untrained(plan, "linear"):
            raise BadInput(f"plan.linear: this release cannot train {', '.join(refused)}; leave it out")
        _check_device(device, moe=model.spec.routed_layers > 0)
    for layer, block in blocks_with_layer(model):
        if formats[layer] == "compute":
            continue
        scaling: Scaling = "tensorwise" if formats[layer] == "fp8_tensorwise" else "rowwise"
        routers = {module.router for module in block.modules() if isinstance(module, MoELayer)}
        for module in block.modules():
            if isinstance(module, Linear) and module not in routers:
                module.scaling = scaling
            elif isinstance(module, Experts):
                module.fp8 = True


def store_frozen_in_fp8(model: Decoder, mesh: DeviceMesh) -> list[StoredFp8]:
    """Store frozen weights in fp8, if their layers multiply in fp8 with one scale per weight. Returns these weights, still empty.

    A frozen weight would be rounded to the same values in each step. With several ranks in `mesh`, which shard weights, nothing is stored
    in fp8, because the ranks gather frozen weights in the compute dtype. The model is on the meta device.
    """
    if mesh.size() > 1:
        return []
    stored = []
    for name, linear in model.named_modules():
        if isinstance(linear, Linear) and linear.scaling == "tensorwise" and not linear.weight.requires_grad:
            linear.weight = nn.Parameter(torch.empty_like(linear.weight, dtype=E4M3), requires_grad=False)
            stored.append(StoredFp8(f"{name}.weight", linear))
    return stored


@dataclass(frozen=True)
class StoredFp8:
    """A frozen weight that is stored in fp8, with one scale."""

    name: str
    """Name of the parameter."""
    linear: Linear

    @torch.no_grad()
    def fill(self, read: Callable[[int, int], torch.Tensor]) -> None:
        """Round the weight to fp8. `read(start, stop)` returns its rows [start, stop) and is called twice for each row.

        The first calls find the largest magnitude of the weight, which decides the scale.
        """
        values = self.linear.weight.detach()
        step = max(1, READ_ELEMENTS // values.shape[1])
        ranges = [(start, min(start + step, len(values))) for start in range(0, len(values), step)]
        largest = torch.stack([read(*rows).abs().amax().float() for rows in ranges]).amax().to(values.device)
        scale = scale_of(largest, E4M3)
        for start, stop in ranges:
            values[start:stop] = round_with_scale(read(start, stop).to(values.device), scale, E4M3)
        self.linear.fp8_weight = Fp8Matrix(values, scale)


def _check_device(device: torch.device, *, moe: bool) -> None:
    """Raise BadInput if the device has no correct fp8 matmuls, or if `moe` and the device has no grouped fp8 matmuls."""
    if device.type == "cpu":
        return
    name = torch.cuda.get_device_name(device)
    capability = torch.cuda.get_device_capability(device)
    if moe and capability[0] != GROUPED_MAJOR:
        raise BadInput(
            f"plan.linear: torch has no grouped fp8 matmuls for experts on {name}: expected Hopper (compute capability "
            f"{GROUPED_MAJOR}.x), or plan.linear left out"
        )
    if torch.version.hip or capability < CAPABILITY:
        raise BadInput(
            f"plan.linear: {name} has no fp8 matmuls as this release uses them: expected an NVIDIA GPU of compute capability 8.9 "
            "or more (Ada, Hopper and later); leave plan.linear and plan.gather out, or use such a GPU"
        )
    if kernel := find_miscompiled_kernel(device):
        raise BadInput(
            f"plan.linear: {kernel} gives wrong bytes as {os.environ.get(VARIABLE, 'the ptxas of Triton')} assembles it; "
            f"expected {VARIABLE} to name the ptxas of a later CUDA, or plan.linear left out"
        )


class WeightScales:
    """The scales of a rank's weights that are gathered in fp8, on the device. `mesh` has the ranks that shard these weights."""

    def __init__(self, units: Iterable[ShardedUnit], mesh: DeviceMesh, device: torch.device) -> None:
        linear_weights = (weight for unit in units for weight in unit.linear_weights)
        weights = [weight for weight in linear_weights if weight.linear and weight.linear.scaling == "tensorwise"]
        self._shards = [weight.flat_shard for weight in weights]
        self._scales = torch.ones(2, len(weights), SCALE_STRIDE, device=device)  # scales, then inverses
        self._group = mesh.get_group() if mesh.size() > 1 else None
        for number, weight in enumerate(weights):
            weight.gather_in_fp8(self._scales[0, number, 0], self._scales[1, number, 0])

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the scales for the current weights. Collective over the ranks that shard the weights; the host does not wait."""
        if not self._shards:
            return
        largest = torch.stack(torch._foreach_norm(self._shards, ord=float("inf")))
        if self._group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        scale = scale_of(largest, E4M3)
        self._scales[:, :, 0] = torch.stack([scale, inverse(scale)])
