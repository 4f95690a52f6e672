"""What a plan's fp8 asks of a model: which layers multiply in it, and the scales of weights that travel in it.

A weight's scale comes from its largest magnitude over all ranks that hold a part of it. All weights of a rank are measured at once, before
the first gather after an update, and one all-reduce brings their maxima together, so a gather itself waits for nobody but its collective.
(torchao, which did this first for FSDP2, calls it precomputed scales.)
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.kernels.assembler import VARIABLE
from meshwright.kernels.fp8_products import E4M3, inverse, scale_of
from meshwright.kernels.gated import find_miscompiled_kernel
from meshwright.kernels.linear import Linear
from meshwright.models.decoder import Decoder
from meshwright.parallel.sharded_unit import ShardedUnit
from meshwright.spec.errors import BadInput
from meshwright.spec.fp8_limits import fp8_conflict
from meshwright.spec.plan import Plan

CAPABILITY = (8, 9)
"""The first NVIDIA GPUs that multiply fp8 numbers: Ada; Hopper is 9.0."""
SLOT = 4
"""Numbers between one scale and the next: compiled code takes its inputs as they are only where they begin on 16 bytes."""


def use_fp8_products(model: Decoder, plan: Plan, device: torch.device) -> None:
    """Let the linear layers of every block multiply in the format that the plan has for its layer.

    Raises BadInput on a GPU that cannot multiply in fp8. A processor gives the same numbers, slowly.
    """
    formats = {layer: plan.linear(int(layer), model.spec.layers) for layer in model.layers}
    if any(kind != "compute" for kind in formats.values()):
        if beside := fp8_conflict(plan, experts=model.spec.experts > 0):
            raise BadInput(f"plan.linear: fp8 does not go with {beside} in this release; leave it out")
        _refuse_other_devices(device)
    for layer, block in model.layers.items():
        for module in block.modules():
            if isinstance(module, Linear) and formats[layer] != "compute":
                module.scaling = "tensorwise" if formats[layer] == "fp8_tensorwise" else "rowwise"


def _refuse_other_devices(device: torch.device) -> None:
    if device.type == "cpu":
        return
    name = torch.cuda.get_device_name(device)
    if torch.version.hip or torch.cuda.get_device_capability(device) < CAPABILITY:
        raise BadInput(
            f"plan.linear: {name} has no fp8 products as this release uses them: expected an NVIDIA GPU of compute capability 8.9 "
            "or more (Ada, Hopper and later); leave plan.linear and plan.gather out, or use such a GPU"
        )
    if wrong := find_miscompiled_kernel(device):
        raise BadInput(
            f"plan.linear: {wrong} gives wrong bytes as {os.environ.get(VARIABLE, 'the ptxas of Triton')} assembles it; "
            f"expected {VARIABLE} to name the ptxas of a later CUDA, or plan.linear left out"
        )


class WeightScales:
    """The scales of one rank's fp8 weights, kept on the device."""

    def __init__(self, units: Iterable[ShardedUnit], mesh: DeviceMesh, device: torch.device) -> None:
        linear_weights = (weight for unit in units for weight in unit.linear_weights)
        weights = [weight for weight in linear_weights if weight.linear and weight.linear.scaling == "tensorwise"]
        self._shards = [weight.flat_shard for weight in weights]
        self._scales = torch.ones(2, len(weights), SLOT, device=device)
        self._group = mesh.get_group() if mesh.size() > 1 else None
        for number, weight in enumerate(weights):
            weight.gather_in_fp8(self._scales[0, number, 0], self._scales[1, number, 0])

    @torch.no_grad()
    def refresh(self) -> None:
        """Measure the weights as they are now. Collective over the ranks that share them; nothing waits for the device."""
        if not self._shards:
            return
        largest = torch.stack(torch._foreach_norm(self._shards, ord=float("inf")))
        if self._group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        scale = scale_of(largest, E4M3)
        self._scales[:, :, 0] = torch.stack([scale, inverse(scale)])
