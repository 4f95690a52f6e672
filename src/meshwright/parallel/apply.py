"""Applies a Plan to a model; the only place that fixes the order of the steps.

Cut into stages, divide over tensor ranks, then context ranks, distribute experts, number formats, recompute, compile,
split the backward, shard, materialise, initialise. Model code has no part in it: a block's `forward` is wrapped, its
name and parameters stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.kernels.linear import split_backward
from meshwright.models.decoder import Block, Decoder
from meshwright.models.initial_values import initial_values
from meshwright.parallel.channels import open_channels
from meshwright.parallel.context import divide_sequences
from meshwright.parallel.copy_engine import gather_by_copies
from meshwright.parallel.executor import Executor
from meshwright.parallel.experts import count_whole_sequences, spread_experts
from meshwright.parallel.fp8_weights import WeightScales, multiply_low
from meshwright.parallel.fsdp import DTYPES, CommunicationStreams
from meshwright.parallel.gradient_sums import GradientSums
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.offload import HostMemory
from meshwright.parallel.recompute import recomputing
from meshwright.parallel.replicas import ReplicaSums
from meshwright.parallel.routing import Routing
from meshwright.parallel.sharded_unit import ShardedUnit
from meshwright.parallel.stages import RankModel, keep_only, keep_parts, make_units
from meshwright.parallel.tensor import CopySums, divide_over_tensor_ranks, rows_of
from meshwright.parallel.tied import TiedSum
from meshwright.schedules.plan_schedule import evaluation_schedule, training_schedule
from meshwright.schedules.registry import entry_of
from meshwright.schedules.schedule import Schedule
from meshwright.spec.layout import UNDIVIDED, WHOLE, Box, Division, Part, local_boxes, rank_parameters, stage_table
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters
from meshwright.spec.plan import Plan, Recompute
from meshwright.state.parts import StateParts, weight_name
from meshwright.workload.dtypes import accumulated_by_products

COMPILER: dict[str, Any] = {"unroll_reductions_threshold": 17}
"""Compiler options of blocks.

Sums over a token's experts, up to 16, are unrolled to additions, which torch does below 8 by default: as a reduction
over 8 copies a kernel read single numbers of distant rows, at 0.7 TB/s on an H200, where a copy reaches 4.2.
"""


@dataclass
class Engine:
    """A model under a plan on one rank: the part of it the rank holds, and what runs it.

    `training` is the schedule of a step; `evaluating(n)` that of a pass without backward over n micro-batches. `weights` has this rank's
    pieces of each parameter, on the device (`AdamW.state` knows which of them it has moved to host memory). `copied` lists by parameter
    the rows of this rank's tensor whose gradients another rank counts in the norm: the second end's copy of a tied weight, and what tensor
    ranks hold alike on all of them but the first. `host_offloaded` maps each parameter whose optimizer is in host memory to the function
    that releases its master weight from the device, or to None.
    """

    model: Decoder
    executor: Executor
    training: Schedule
    evaluating: Callable[[int], Schedule]
    weights: Mapping[str, StateParts]
    copied: Mapping[str, Sequence[range]]
    host_offloaded: Mapping[str, Callable[[], torch.Tensor] | None]

    @property
    def holds_loss(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.training.stages - 1 in self.executor.rank_model.stages


def _unheard(phase: str) -> None:
    """Nobody counts."""


def build_engine(
    spec: ModelSpec,
    plan: Plan,
    mesh: Mesh,
    *,
    loss_chunk: int,
    seed: int,
    plain: bool = False,
    balance_loss: float = 0.0,
    passed: Callable[[str], None] = _unheard,
) -> Engine:
    """This rank's part of a decoder with its initial values, ready to train.

    `plain` uses the kernels' plain twins (the reference of the equality tests); `balance_loss` weighs the experts' balance losses against
    the tokens'. `passed` is called with the name of each phase of the work that has ended (events.start). Raises BadInput when the
    schedule cannot be made for the plan's sizes.
    """
    pipeline_rank, table = (
        mesh.coordinate("pipeline"),
        stage_table(plan.schedule, mesh.axis_size("pipeline"), spec.layers),
    )
    training = training_schedule(plan, spec.layers)
    with torch.device("meta"):
        model = Decoder(spec, loss_chunk=loss_chunk, plain=plain)
    if plan.precision.compute == "fp64":
        model.to(torch.float64)
    keep_only(model, rank_parameters(spec, table, pipeline_rank))
    division = mesh.division
    keep_parts(model, division)
    divide_over_tensor_ranks(model, mesh, plan.tensor_engine)
    context = divide_sequences(model, plan, mesh)
    spread_experts(model, mesh)
    count_whole_sequences(model, mesh)
    multiply_low(model, plan, mesh.device)
    wrap_blocks(model, plan)
    for number, block in model.layers.items():
        if entry_of(plan.schedule.name).splits_backward or accumulated_by_products(plan, int(number), spec.layers):
            split_backward(block)
    units = make_units(model, table[pipeline_rank], plan, mesh)
    model.to_empty(device=mesh.device)
    passed("model")
    initialise_shards(model, seed, division)
    passed("weights")
    tied = _tied_sum(model, table, mesh)
    held = {name: parts.boxes for name, parts in held_weights(model, division).items()}
    copies = CopySums(model, held, mesh) if division.tensor.count > 1 else None
    sharded = list(dict.fromkeys(unit.sharded for stage_units in units for unit in stage_units))
    streams = CommunicationStreams((group for unit in sharded for group in unit.groups), mesh.device)
    if plan.gather_engine == "copy":
        # Experts on ranks of their own are another group's to gather, by kernels.
        last = {unit.sharded.groups[-1]: unit.layer is not None for stage_units in units for unit in stage_units}
        blocks, ends = ([group for group, is_block in last.items() if is_block is wanted] for wanted in (True, False))
        gather_by_copies(blocks, ends, mesh)
    rank_model = RankModel(
        model,
        dict(zip(training.placement[pipeline_rank], units, strict=True)),
        pipeline_rank,
        dtype=DTYPES[plan.precision.compute],
        device=mesh.device,
        tensor_ranks=division.tensor.count,
        context=context,
        routing=Routing(spec, balance_loss, plan.batch.global_batch, mesh.device) if spec.experts else None,
    )
    executor = Executor(
        rank_model,
        streams,
        GradientSums(_replica_sums(plan, mesh), tied, copies),
        scales=WeightScales(sharded, mesh.shards, mesh.device) if plan.precision.gather == "fp8" else None,
        channels=open_channels(mesh, training.channels) if training.ranks > 1 else None,
        host=HostMemory(mesh.device) if any(unit.offloads for stage_units in units for unit in stage_units) else None,
    )
    return Engine(
        model,
        executor,
        training,
        partial(evaluation_schedule, plan, spec.layers),
        held_weights(model, division),
        _copied(held, tied),
        _host_offloaded(model, plan, sharded),
    )


def _host_offloaded(
    model: Decoder, plan: Plan, units: Sequence[ShardedUnit]
) -> dict[str, Callable[[], torch.Tensor] | None]:
    releases = {
        id(parameter.shard): parameter.release_master_weight
        for unit in units
        for group in unit.groups
        for parameter in group.parameters
    }
    has_master = plan.precision.resident != plan.precision.stored
    return {
        name: releases[id(weight)] if has_master else None
        for name, weight in model.named_parameters()
        if plan.strategy_of(name, model.spec.layers).optimizer_offloaded
    }


def _copied(held: Mapping[str, Sequence[Box]], tied: TiedSum | None) -> dict[str, tuple[range, ...]]:
    second_end = "embed.weight" if tied is not None and not tied.counts else None
    found = {
        name: tuple(rows_of(box) for box in boxes if not box.primary or name == second_end)
        for name, boxes in held.items()
    }
    return {name: rows for name, rows in found.items() if rows}


def _replica_sums(plan: Plan, mesh: Mesh) -> ReplicaSums | None:
    group = mesh.group("replicate")
    if group is None:
        return None
    reduce = plan.precision.reduce_replicas
    return ReplicaSums(group, DTYPES[reduce] if reduce else None, mesh.device)


def _tied_sum(model: Decoder, table: tuple[tuple[range, ...], ...], mesh: Mesh) -> TiedSum | None:
    """The sum over the two ends of the pipeline, when they share a weight and live on different ranks."""
    first = next(rank for rank, row in enumerate(table) if any(stage.start == 0 for stage in row))
    last = next(rank for rank, row in enumerate(table) if any(stage.stop == model.spec.layers for stage in row))
    if not model.spec.tied or first == last:
        return None
    group = mesh.pair(first, last)
    if group is None:
        return None
    return TiedSum(model.embed.weight, group, counts=mesh.coordinate("pipeline") == first)


def wrap_blocks(model: Decoder, plan: Plan) -> None:
    """Give every block its recompute mode, then compile it.

    Compiling around the recompute lets the compiler see what is kept. All blocks share one compiled function. Where nothing is compiled,
    torch's compiler is not even named: naming it imports it.
    """
    compiled = torch.compile(_call, fullgraph=True, dynamic=False, options=COMPILER) if plan.compile else None
    for layer, block in model.layers.items():
        assert isinstance(block, Block)
        mode = plan.strategy(int(layer), model.spec.layers).recompute
        if compiled is not None:
            block.forward = partial(compiled, type(block).forward, mode, block)
        else:
            block.forward = recomputing(block.forward, mode, block.routed)


def _call(forward: Callable[..., Any], mode: Recompute, block: Block, *inputs: Any) -> Any:
    return recomputing(partial(forward, block), mode, block.routed)(*inputs)


def held_weights(model: Decoder, division: Division = UNDIVIDED) -> dict[str, StateParts]:
    """By name, what this rank holds of each parameter of a model that was divided and sharded, or was not."""
    specs = {parameter.name: parameter for parameter in parameters(model.spec)}
    return {name: _held(model.spec, specs[name], weight, division) for name, weight in model.named_parameters()}


def _held(spec: ModelSpec, parameter: ParameterSpec, weight: torch.Tensor, division: Division) -> StateParts:
    local, shard = local_part(weight.detach())
    return StateParts(
        weight_name(parameter.name), parameter.shape, local_boxes(spec, parameter, division, shard), local
    )


def local_part(parameter: torch.Tensor) -> tuple[torch.Tensor, Part]:
    """This rank's rows of a parameter as a plain tensor, and which of how many shards they are."""
    if not isinstance(parameter, DTensor):
        return parameter, WHOLE
    mesh = parameter.device_mesh
    axis = mesh.ndim - 1
    return parameter.to_local(), Part(mesh.get_local_rank(axis), mesh.size(axis))


@torch.no_grad()
def initialise_shards(model: Decoder, seed: int, division: Division = UNDIVIDED) -> None:
    """Fill this rank's part of every parameter; the values do not depend on how the model is sharded."""
    held = held_weights(model, division)
    for parameter in parameters(model.spec):
        for box, elements in held[parameter.name].pieces() if parameter.name in held else ():
            _fill(elements, parameter, seed, box)


def _fill(local: torch.Tensor, parameter: ParameterSpec, seed: int, box: Box) -> None:
    if parameter.fill != "normal":
        local.fill_(1.0 if parameter.fill == "ones" else 0.0)
        return
    width = parameter.count // parameter.shape[0]
    step = max(1, (1 << 26) // width)
    for start in range(0, local.shape[0], step):
        part = local[start : start + step]
        # Whole rows, of which a part of the columns may be kept: only runs of elements can be drawn.
        values = initial_values(seed, parameter, (box.offsets[0] + start) * width, part.shape[0] * width, local.device)
        values = values.view(part.shape[0], *parameter.shape[1:])
        part.copy_(values if values.shape == part.shape else values.narrow(1, box.offsets[1], box.sizes[1]))
