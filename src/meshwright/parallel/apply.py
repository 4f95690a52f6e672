"""Applies a Plan to a model; `build_engine` alone decides the order of the transforms.

The order: remove other stages, divide over tensor ranks, divide over context or hybrid ranks, distribute experts, use fp8 matmuls, tile,
recompute, compile, split the backward, shard, allocate memory, initialise. The model code does not change. A transform replaces modules,
sets their attributes, or sets functions of `models.hooks.BlockHooks`. Parameter names stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.kernels.fp8_matmuls import E4M3
from meshwright.kernels.linear import with_taps
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initial_values
from meshwright.parallel.block_parts import BlockParts, parts_of
from meshwright.parallel.blocks import blocks_with_layer, numbered_blocks
from meshwright.parallel.channels import open_channels
from meshwright.parallel.context import divide_sequences
from meshwright.parallel.copy_engine import use_copy_engines
from meshwright.parallel.executor import Executor
from meshwright.parallel.experts import count_expert_loads_over_whole_sequences, distribute_experts
from meshwright.parallel.fp8_weights import StoredFp8, WeightScales, store_frozen_in_fp8, use_fp8_matmuls
from meshwright.parallel.fsdp import DTYPES, CommunicationStreams
from meshwright.parallel.gradient_sums import GradientSums
from meshwright.parallel.hybrid import divide_samples
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.offload import HostMemory
from meshwright.parallel.predictions import PredictionLoss
from meshwright.parallel.present_experts import PresentExperts
from meshwright.parallel.recompute import with_recompute
from meshwright.parallel.replicas import ReplicaSums
from meshwright.parallel.routing import RoutingStatistics
from meshwright.parallel.sharded_unit import ShardedUnit
from meshwright.parallel.stages import StageModel, StageUnit, make_units, remove_other_modules, shrink_to_local_parts
from meshwright.parallel.tensor import TensorCopySums, divide_over_tensor_ranks, rows_of
from meshwright.parallel.tied import TiedGradientSum
from meshwright.schedules.plan_schedule import evaluation_schedule, training_schedule
from meshwright.schedules.schedule import Schedule
from meshwright.spec.layout import UNDIVIDED, WHOLE, AxisPart, Box, Division, local_boxes, rank_parameters, stage_table
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters
from meshwright.spec.plan import SPLITS_BACKWARD, Moments, Plan, Recompute
from meshwright.state.parts import StateParts, weight_name
from meshwright.workload.dtypes import matmuls_accumulate_gradients

COMPILER_OPTIONS: dict[str, Any] = {"unroll_reductions_threshold": 17}
"""Options of `torch.compile` for blocks.

The sum over a token's experts is unrolled to additions for up to 16 experts; torch's default is fewer than 8. With 8 experts torch would
generate a reduction kernel that loads single elements of distant rows: it moves 0.7 TB/s on an H200, where a copy reaches 4.2 TB/s.
"""


@dataclass
class PlannedModel:
    """A rank's part of a model under a plan, and the executor that runs it.

    - `training`: the schedule of a training step as planned.
    - `training_schedule(n)`: the schedule of a training step of n micro-batches.
    - `evaluation_schedule(n)`: the schedule of n micro-batches without backward.
    - `weights`: this rank's part of each parameter, on the device. Master weights in host memory are in `Optimizer.state` instead.
    - `duplicate_rows`: for each parameter, the rows on this rank that the gradient norm must not count, because another rank counts its
      copy of them. These are the last stage's copy of the embedding and, on all tensor ranks except the first, the parameters that tensor
      ranks do not divide.
    - `host_offloaded`: the parameters whose optimizer state is in host memory. The value is a function that releases the master weight on
      the device, or None if the plan has no separate master weights.
    - `present_experts`: for each layer, the copies of experts on each rank; empty if the plan copies none.
    - `moments`, `offload_fraction`, `offload_staging` (in bytes): settings of the plan for the optimizer.
    - `stored_fp8`: frozen weights that are stored in fp8; `weights` does not have them.
    """

    model: Decoder
    executor: Executor
    training: Schedule
    training_schedule: Callable[[int], Schedule]
    evaluation_schedule: Callable[[int], Schedule]
    weights: Mapping[str, StateParts]
    duplicate_rows: Mapping[str, Sequence[range]]
    host_offloaded: Mapping[str, Callable[[], torch.Tensor] | None]
    present_experts: Mapping[int, PresentExperts]
    moments: Moments = "fp32"
    offload_fraction: float = 1.0
    offload_staging: int = 0
    stored_fp8: Sequence[StoredFp8] = ()

    @property
    def holds_loss(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.training.stages - 1 in self.executor.rank_model.stages


def _ignore_phase(phase: str) -> None:
    """Do nothing; the default of `build_engine` for `on_phase_end`."""


def build_engine(
    spec: ModelSpec,
    plan: Plan,
    mesh: Mesh,
    *,
    loss_chunk: int,
    seed: int,
    reference: bool = False,
    balance_loss: float = 0.0,
    balance_bias: float = 0.0,
    prediction_loss: float = 0.0,
    z_loss: float = 0.0,
    router_z_loss: float = 0.0,
    recomputes: bool = True,
    on_phase_end: Callable[[str], None] = _ignore_phase,
) -> PlannedModel:
    """Build this rank's part of a decoder with its initial values, ready to train. Collective over all ranks of the job.

    - `loss_chunk`: number of tokens whose logits are in memory at a time.
    - `reference`: use PyTorch operations instead of our kernels; the reference of the equality tests.
    - `balance_loss`, `z_loss`, `router_z_loss`, `prediction_loss`: weights of losses that are added to the cross-entropy (`TrainSpec`).
    - `balance_bias`: by how much a step moves the bias of an expert.
    - `recomputes`: False makes blocks save what autograd saves, whatever the plan's recompute mode is, because the caller recomputes them
      itself (`rl.exact_blocks`).
    - `on_phase_end`: called with the name of each completed phase of the start (`events.start`).

    Raises BadInput if the schedule does not exist for the plan's sizes.
    """
    pipeline_rank = mesh.coordinate("pipeline")
    table = stage_table(plan.schedule, mesh.axis_size("pipeline"), spec.layers)
    training = training_schedule(plan, spec.layers)
    with torch.device("meta"):
        model = Decoder(spec, loss_chunk=loss_chunk, reference=reference, z_loss=z_loss)
    if plan.precision.compute == "fp64":
        model.to(torch.float64)
    remove_other_modules(model, rank_parameters(spec, table, pipeline_rank))
    division = mesh.division
    shrink_to_local_parts(model, division, DTYPES[plan.precision.compute])
    divide_over_tensor_ranks(model, mesh, plan.tensor_transport)
    context = divide_sequences(model, plan, mesh) or divide_samples(model, mesh)
    presents = distribute_experts(model, mesh, plan.experts)
    count_expert_loads_over_whole_sequences(model, mesh)
    use_fp8_matmuls(model, plan, mesh.device)
    stored_fp8 = store_frozen_in_fp8(model, mesh.shards)
    parts = wrap_blocks(model, plan, recomputes=recomputes)
    for layer, block in blocks_with_layer(model):
        # With taps, matmuls that add to the gradients of earlier micro-batches run in the weight half of a split backward. Without taps
        # autograd would return each micro-batch's gradient separately.
        if plan.schedule.name in SPLITS_BACKWARD or matmuls_accumulate_gradients(plan, layer, spec.layers):
            block.hooks.run = with_taps(block.hooks.run, [block])
    units = make_units(model, table[pipeline_rank], plan, mesh, parts)
    model.to_empty(device=mesh.device)
    on_phase_end("model")
    initialise_shards(model, seed, division, stored_fp8)
    on_phase_end("weights")
    tied = _tied_sum(model, table, mesh)
    # A box is a rectangular region of a parameter. A rank's part of a fused weight may consist of several boxes.
    boxes_by_parameter = {name: parts.boxes for name, parts in local_weights(model, division).items()}
    copies = TensorCopySums(model, boxes_by_parameter, mesh) if division.tensor.count > 1 else None
    sharded = list(dict.fromkeys(unit.sharded for stage_units in units for unit in stage_units))
    streams = CommunicationStreams((group for unit in sharded for group in unit.owners), mesh.device)
    if plan.gather_transport == "copy_engine":
        # Copy engines gather the last parameter group of each unit. Experts may have a group before it, which NCCL kernels gather.
        blocks, ends = (
            dict.fromkeys(
                unit.sharded.owners[-1]
                for stage_units in units
                for unit in stage_units
                if (unit.layer is not None) is of_block
            )
            for of_block in (True, False)
        )
        use_copy_engines(list(blocks), list(ends), mesh)
    rank_model = StageModel(
        model,
        dict(zip(training.placement[pipeline_rank], units, strict=True)),
        pipeline_rank,
        dtype=DTYPES[plan.precision.compute],
        device=mesh.device,
        tensor=division.tensor,
        context=context,
        routing=_routing(model, mesh, balance_loss, balance_bias, router_z_loss),
        predictions=PredictionLoss(spec, prediction_loss, mesh.device) if spec.prediction_depth else None,
    )
    executor = Executor(
        rank_model,
        streams,
        GradientSums(_replica_sums(plan, mesh), tied, copies),
        scales=WeightScales(sharded, mesh.shards, mesh.device) if plan.precision.gather == "fp8" else None,
        channels=open_channels(mesh, training.channels) if training.ranks > 1 else None,
        **_host_memories(units, plan, mesh.device),
    )
    return PlannedModel(
        model,
        executor,
        training,
        partial(training_schedule, plan, spec.layers),
        partial(evaluation_schedule, plan, spec.layers),
        {name: parts for name, parts in local_weights(model, division).items() if parts.local.dtype != E4M3},
        _duplicate_rows(boxes_by_parameter, tied),
        _host_offloaded(model, plan, sharded),
        presents,
        *(plan.precision.moments, plan.offload_fraction, round(plan.offload_staging * 1e9)),
        stored_fp8=stored_fp8,
    )


def _routing(
    model: Decoder, mesh: Mesh, balance_loss: float, balance_bias: float, z_loss: float
) -> RoutingStatistics | None:
    """Turn the z-loss of the model's routers on or off, and return the object that collects their statistics; None for a dense model."""
    if not model.spec.routed_layers:
        return None
    moe_layers = {number: block.moe for number, block in numbered_blocks(model) if block.routed}
    for moe in moe_layers.values():
        moe.z_loss = z_loss > 0
    biases = {number: moe.choice_bias for number, moe in moe_layers.items() if moe.choice_bias is not None}
    return RoutingStatistics(
        model.spec,
        balance_loss,
        mesh.data_ranks,
        mesh.device,
        biases=biases,
        bias_step=balance_bias,
        z_loss=z_loss,
    )


def _host_memories(
    units: Sequence[Sequence[StageUnit]], plan: Plan, device: torch.device
) -> dict[str, HostMemory | None]:
    """Return the executor's host buffers for activations and for gradient sums; None for those that the plan does not offload."""
    slots_offload = plan.samples is not None and plan.samples.offload is not None
    offloads = slots_offload or any(unit.offloads for stage_units in units for unit in stage_units)
    return {
        "host": HostMemory(device) if offloads else None,
        "sums_on_host": HostMemory(device, purpose="gradients") if plan.accumulation == "host" else None,
    }


def _host_offloaded(
    model: Decoder, plan: Plan, units: Sequence[ShardedUnit]
) -> dict[str, Callable[[], torch.Tensor] | None]:
    """Return `PlannedModel.host_offloaded`."""
    releases = {
        id(parameter.shard): parameter.release_master_weight
        for unit in units
        for group in unit.owners
        for parameter in group.parameters
    }
    has_master = plan.precision.resident != plan.precision.stored
    return {
        name: releases[id(weight)] if has_master else None
        for name, weight in model.named_parameters()
        if weight.requires_grad and plan.strategy_of(name, model.spec.layers).optimizer_offloaded
    }


def _duplicate_rows(
    boxes_by_parameter: Mapping[str, Sequence[Box]], tied: TiedGradientSum | None
) -> dict[str, tuple[range, ...]]:
    """Return `PlannedModel.duplicate_rows`."""
    tied_copy = "embed.weight" if tied is not None and not tied.in_norm else None
    rows_by_parameter = {
        name: tuple(rows_of(box) for box in boxes if not box.primary or name == tied_copy)
        for name, boxes in boxes_by_parameter.items()
    }
    return {name: rows for name, rows in rows_by_parameter.items() if rows}


def _replica_sums(plan: Plan, mesh: Mesh) -> ReplicaSums | None:
    group = mesh.group("replicate")
    if group is None:
        return None
    reduce = plan.precision.reduce_replicas
    return ReplicaSums(group, DTYPES[reduce] if reduce else None, mesh.device)


def _tied_sum(model: Decoder, table: tuple[tuple[range, ...], ...], mesh: Mesh) -> TiedGradientSum | None:
    """Return the gradient sum over first and last stage, if both use the embedding and are on different ranks; else None. Collective."""
    first = next(rank for rank, stages in enumerate(table) if any(stage.start == 0 for stage in stages))
    last = next(rank for rank, stages in enumerate(table) if any(stage.stop == model.spec.layers for stage in stages))
    if not model.spec.embedding_at_both_ends or first == last or model.spec.adapter is not None:
        return None  # a frozen embedding has no gradient
    group = mesh.pair(first, last)
    if group is None:
        return None
    return TiedGradientSum(model.embed.weight, group, in_norm=mesh.coordinate("pipeline") == first)


def wrap_blocks(model: Decoder, plan: Plan, *, recomputes: bool = True) -> dict[int, BlockParts]:
    """Make the blocks' forwards recompute, and compile them if the plan does. Also set the tile of every dense feed-forward network.

    The compiled function includes the recompute, so that the compiler knows which activations are saved. All blocks share one compiled
    function. Without `recomputes` the recompute mode is `none`. Without compilation `torch.compile` is not accessed, because the access
    imports the compiler.

    If the plan runs two micro-batches together, returns for each layer the three parts of its block with experts, wrapped in the same way.
    """
    compiled = (
        torch.compile(_forward_with_recompute, fullgraph=True, dynamic=False, options=COMPILER_OPTIONS)
        if plan.compile
        else None
    )
    parts: dict[int, BlockParts] = {}
    for layer, block in blocks_with_layer(model):
        if not block.routed:
            block.mlp.tile = plan.tile(layer, model.spec.layers)
        mode = plan.strategy(layer, model.spec.layers).recompute if recomputes else "none"
        if compiled is not None:
            block.hooks.run = partial(compiled, block.hooks.run, mode)
        else:
            block.hooks.run = with_recompute(block.hooks.run, mode, block.routed)
        if plan.paired and block.routed and layer not in parts:
            parts[layer] = _parts(block, mode, compiled, matmuls_accumulate_gradients(plan, layer, model.spec.layers))
    return parts


def _parts(block: Block, mode: Recompute, compiled: Callable[..., Any] | None, taps: bool) -> BlockParts:
    """Return the three parts of a block, with the same recompute and compilation as its forward."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        if compiled is not None:
            return partial(compiled, function, mode, block)
        return with_recompute(partial(function, block), mode, routed=True)

    return parts_of(block, wrap, partial(with_recompute, mode=mode, routed=True), taps=taps)


def _forward_with_recompute(forward: Callable[..., Any], mode: Recompute, block: Block, *inputs: Any) -> Any:
    return with_recompute(partial(forward, block), mode, block.routed, compiled=True)(*inputs)


def local_weights(model: Decoder, division: Division = UNDIVIDED) -> dict[str, StateParts]:
    """Return this rank's part of each parameter, by name. The model may be whole, or divided by `division` and sharded."""
    specs = {parameter.name: parameter for parameter in parameters(model.spec)}
    return {name: _local_weight(specs[name], weight, division) for name, weight in model.named_parameters()}


def _local_weight(parameter: ParameterSpec, weight: torch.Tensor, division: Division) -> StateParts:
    local, shard = _local_shard(weight.detach())
    return StateParts(weight_name(parameter.name), parameter.shape, local_boxes(parameter, division, shard), local)


def _local_shard(parameter: torch.Tensor) -> tuple[torch.Tensor, AxisPart]:
    """Return this rank's shard of a parameter as a local tensor, with the index of the shard and the number of shards."""
    if not isinstance(parameter, DTensor):
        return parameter, WHOLE
    mesh = parameter.device_mesh
    axis = mesh.ndim - 1
    return parameter.to_local(), AxisPart(mesh.get_local_rank(axis), mesh.size(axis))


@torch.no_grad()
def initialise_shards(
    model: Decoder, seed: int, division: Division = UNDIVIDED, stored_fp8: Sequence[StoredFp8] = ()
) -> None:
    """Fill this rank's part of every parameter with initial values. They do not depend on how the model is sharded.

    Weights in `stored_fp8` are rounded to fp8.
    """
    parts_by_parameter = local_weights(model, division)
    in_fp8 = {stored.name: stored for stored in stored_fp8}
    for parameter in parameters(model.spec):
        if stored := in_fp8.get(parameter.name):
            stored.fill(partial(_initial_rows, seed, parameter, stored.linear.weight.device))
        elif parameter.name in parts_by_parameter:
            for box, elements in parts_by_parameter[parameter.name].pieces():
                _fill(elements, parameter, seed, box)


def _initial_rows(seed: int, parameter: ParameterSpec, device: torch.device, start: int, stop: int) -> torch.Tensor:
    """Return rows [start, stop) of the initial values of a weight matrix."""
    width = parameter.shape[1]
    return initial_values(seed, parameter, start * width, (stop - start) * width, device).view(-1, width)


def _fill(local: torch.Tensor, parameter: ParameterSpec, seed: int, box: Box) -> None:
    """Fill `local` with the initial values of the region `box` of a parameter."""
    if parameter.fill != "normal":
        local.fill_(1.0 if parameter.fill == "ones" else 0.0)
        return
    width = parameter.count // parameter.shape[0]
    step = max(1, (1 << 26) // width)
    for start in range(0, local.shape[0], step):
        part = local[start : start + step]
        # `initial_values` computes contiguous elements only, so compute whole rows and keep this rank's columns.
        values = initial_values(seed, parameter, (box.offsets[0] + start) * width, part.shape[0] * width, local.device)
        values = values.view(part.shape[0], *parameter.shape[1:])
        part.copy_(values if values.shape == part.shape else values.narrow(1, box.offsets[1], box.sizes[1]))
