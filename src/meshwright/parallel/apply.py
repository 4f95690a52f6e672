"""The order in which a Plan is applied to a model: cut, recompute, compile, split the backward, shard, materialise, initialise.

This is the one place that fixes it. The model never learns of any of it: a block's `forward` is wrapped, its name and parameters stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.kernels.linear import split_backward
from meshwright.models.decoder import Decoder
from meshwright.models.initial import initial_values
from meshwright.parallel.channels import open_channels
from meshwright.parallel.executor import Executor
from meshwright.parallel.fsdp import DTYPES, Streams
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.recompute import recomputing
from meshwright.parallel.replicas import ReplicaSums
from meshwright.parallel.routing import Routing
from meshwright.parallel.stages import keep_only, make_units
from meshwright.parallel.tied import TiedSum
from meshwright.schedules.of_plan import evaluation_schedule, training_schedule
from meshwright.schedules.registry import entry_of
from meshwright.schedules.schedule import Schedule
from meshwright.spec.layout import held_parameters, shard_rows, stage_table
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters
from meshwright.spec.plan import Plan, Recompute


@dataclass
class Engine:
    """A model under a plan on one rank: the part of it the rank holds, and what runs it.

    `training` is the schedule of a step; `evaluating(n)` that of a pass without backward over n micro-batches.
    """

    model: Decoder
    executor: Executor
    training: Schedule
    evaluating: Callable[[int], Schedule]
    tied: TiedSum | None = None

    @property
    def holds_loss(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.training.stages - 1 in self.executor.stages

    @property
    def copied(self) -> frozenset[str]:
        """Parameters whose gradients another rank counts in the norm: the second end's copy of a tied weight."""
        return frozenset() if self.tied is None or self.tied.counts else frozenset({"embed.weight"})


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
    keep_only(model, held_parameters(spec, table, pipeline_rank))
    wrap_blocks(model, plan)
    if entry_of(plan.schedule.name).splits_backward:
        for block in model.layers.values():
            split_backward(block)
    units = make_units(model, table[pipeline_rank], plan, mesh.shards)
    model.to_empty(device=mesh.device)
    passed("model")
    initialise_shards(model, spec, seed)
    passed("weights")
    tied = _tied_sum(model, table, mesh)
    executor = Executor(
        model,
        dict(zip(training.placement[pipeline_rank], units, strict=True)),
        pipeline_rank,
        dtype=DTYPES[plan.precision.compute],
        device=mesh.device,
        streams=Streams((unit.sharded for row in units for unit in row), mesh.device),
        channels=open_channels(mesh, training.channels) if training.ranks > 1 else None,
        replicas=_replica_sums(plan, mesh),
        tied=tied,
        routing=Routing(spec, balance_loss, plan.batch.global_batch, mesh.device) if spec.experts else None,
    )
    return Engine(model, executor, training, partial(evaluation_schedule, plan, spec.layers), tied)


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

    Compiling around the recompute lets the compiler see what is kept. All blocks share one compiled function.
    """
    compiled = torch.compile(_call, fullgraph=True, dynamic=False)
    for layer, block in model.layers.items():
        mode = plan.strategy(int(layer), model.spec.layers).recompute
        if plan.compile:
            block.forward = partial(compiled, type(block).forward, mode, block)
        else:
            block.forward = recomputing(block.forward, mode)


def _call(forward: Callable[..., Any], mode: Recompute, block: nn.Module, *inputs: Any) -> Any:
    return recomputing(partial(forward, block), mode)(*inputs)


@torch.no_grad()
def initialise_shards(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill this rank's part of every parameter; the values do not depend on how the model is sharded."""
    rows = {row.name: row for row in parameters(spec)}
    for name, parameter in model.named_parameters():
        local, start = local_rows(parameter)
        _fill(local, rows[name], seed, start)


def local_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's rows of a parameter as a plain tensor, and the number of the first one."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    mesh = parameter.device_mesh
    axis = mesh.ndim - 1
    first = shard_rows(parameter.shape[0], mesh.size(axis), mesh.get_local_rank(axis)).start
    return parameter.to_local(), first


def _fill(local: torch.Tensor, row: ParameterSpec, seed: int, first_row: int) -> None:
    if row.fill != "normal":
        local.fill_(1.0 if row.fill == "ones" else 0.0)
        return
    width = row.count // row.shape[0]
    step = max(1, (1 << 26) // width)
    for start in range(0, local.shape[0], step):
        part = local[start : start + step]
        values = initial_values(seed, row, (first_row + start) * width, part.numel(), local.device)
        part.copy_(values.view_as(part))
