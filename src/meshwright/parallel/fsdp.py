"""Fully sharded data parallelism with FSDP2: one unit per block, one for each end of the model.

Gradients are summed, never averaged: the loss is already divided by the step's valid tokens over all ranks, so a sum is the gradient of
the global mean whatever the number of ranks. (FSDP2 divides by default, and on Gloo a factor of 1 needs the plain sum.)
Method: Zhao et al. 2023 (FSDP), Rajbhandari et al. 2020 (ZeRO); replicate × shard is HSDP.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from meshwright.models.decoder import Decoder
from meshwright.parallel.mesh import Mesh
from meshwright.spec.plan import Plan

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""torch's name of each number format of the Plan."""


def shard_model(model: Decoder, plan: Plan, mesh: Mesh) -> None:
    """Shard every parameter of a (meta) decoder over the mesh, in place.

    Blocks become their own units with the plan's resharding; embedding and head are units of their own, or stay with the root when
    they are tied, because one parameter belongs to one unit. The last unit is never resharded: backward starts with it.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=_compute_dtype(plan), reduce_dtype=DTYPES[plan.precision.reduce], cast_forward_inputs=False
    )
    options: dict[str, Any] = {"mesh": mesh.devices, "mp_policy": policy}
    blocks = list(model.layers)
    for layer, block in enumerate(blocks):
        fully_shard(block, reshard_after_forward=plan.strategy(layer, len(blocks)).reshard, **options)
    if not model.spec.tied:
        fully_shard(model.embed, reshard_after_forward=plan.strategy(0, len(blocks)).reshard, **options)
        fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _prefetch(blocks)


def units(model: nn.Module) -> list[FSDPModule]:
    """Every FSDP unit of the model, outermost first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def accumulate_only(model: nn.Module, accumulate: bool) -> None:
    """Whether the next backward keeps replicas' sums to itself: under HSDP only the last micro-batch crosses the replicas."""
    cast(FSDPModule, model).set_requires_all_reduce(not accumulate)


def _compute_dtype(plan: Plan) -> torch.dtype | None:
    return DTYPES[plan.precision.compute] if plan.precision.compute == "bf16" else None


def _prefetch(blocks: list[nn.Module]) -> None:
    """Ask for the next block's weights while this one computes, in both directions."""
    sharded = cast(list[FSDPModule], blocks)
    for earlier, later in pairwise(sharded):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])
