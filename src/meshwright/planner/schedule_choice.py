"""Divides a model's layers into the pipeline stages of a schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.planner.candidate import pins_of
from meshwright.planner.weighted_stages import balanced_by_weight
from meshwright.simulator.slow_nodes import node_type_speeds, rank_speeds
from meshwright.spec.layout import Layout, balanced_stages, stage_table
from meshwright.spec.model import block_flops_per_token, flops_per_token
from meshwright.spec.plan import MeshAxis, ScheduleName, SchedulePlan
from meshwright.spec.run import RunSpec
from meshwright.workload.rank_layers import StageTable


def with_stages(
    run: RunSpec, name: ScheduleName, pipeline: int, per_rank: int, mesh: tuple[MeshAxis, ...] = ()
) -> SchedulePlan:
    """Return the schedule with its stages: the pinned ones, or else stages that take about equal time.

    `pipeline` is the number of pipeline ranks, and `per_rank` the number of stages on each of them. The last stage also
    has the head. If nodes differ, a pipeline rank gets layers in proportion to its speed, which follows from its nodes
    under `mesh`.

    Raises ValueError (see `stage_table`) if pinned stages are not in the order of the schedule.
    """
    layers = run.model.layers
    pins = pins_of(run)
    if pins.stages:
        table = stage_table(SchedulePlan(name=name, stages=pins.stages), pipeline, layers)
    else:
        speeds = _speeds(run, mesh)
        # One layer per stage on the slowest rank; faster ranks get more layers in proportion to their speed.
        if speeds and name == "breadth_first":
            per_rank = max(1, int(layers * min(speeds) / sum(speeds)))
        table = balanced_stages(name, pipeline, layers, head_in_layers(run), per_rank, speeds)
        if pipeline > 1 and len(run.model.block_kinds) > 1:
            table = _balanced_by_flops(run, table, speeds)
    if len(table) == len(table[0]) == 1:
        return SchedulePlan(name=name)
    return SchedulePlan(
        name=name,
        stages=tuple(tuple(f"{stage.start}-{stage.stop - 1}" for stage in rank_stages) for rank_stages in table),
    )


def _balanced_by_flops(run: RunSpec, table: StageTable, speeds: tuple[float, ...]) -> StageTable:
    """Return stages for a model with different kinds of layers.

    They are the stages of `table`, or other stages if the slowest rank takes less time with them by the FLOPs of its
    layers.
    """
    model = run.model
    seq = run.train.seq_len
    of_kinds = [block_flops_per_token(block, seq, causal=True) for block in model.block_kinds]
    flops = [of_kinds[model.kind(layer)] for layer in range(model.layers)]
    mean = sum(flops) / len(flops)
    head = _flops_of_head_and_block(run)[0] / mean
    return balanced_by_weight(table, tuple(layer / mean for layer in flops), head, speeds or (1.0,) * len(table))


def _speeds(run: RunSpec, mesh: tuple[MeshAxis, ...]) -> tuple[float, ...]:
    """Return the relative speed of each pipeline rank; an empty tuple if all nodes are equal."""
    if not run.cluster.groups or not mesh:
        return ()
    layout = Layout(tuple((axis.axis, axis.size) for axis in mesh), run.cluster.ranks_per_node)
    return rank_speeds(node_type_speeds(run.model, run.train, run.cluster), run.cluster, layout)


def head_in_layers(run: RunSpec) -> float:
    """Return the FLOPs of the output head, in units of the FLOPs of one block."""
    head, block = _flops_of_head_and_block(run)
    return head / block


def _flops_of_head_and_block(run: RunSpec) -> tuple[float, float]:
    """Return the FLOPs of one token: (in the head with prediction modules, in a block that has the model's own
    settings).

    They follow from models with one and with two such blocks. If one block and the head take 14 FLOPs, and two blocks
    and the head take 24, the head takes 4 and a block takes 10:

    >>> 2 * 14 - 24, 24 - 14
    (4, 10)
    """
    model = run.model
    seq = run.train.seq_len
    alike: dict[str, Any] = {"blocks": {}, "pattern": (), "first": (), "sequence": ()}
    one_layer, two_layers = (
        flops_per_token(replace(model, layers=layers, **alike), seq, causal=True) for layers in (1, 2)
    )
    return 2 * one_layer - two_layers, two_layers - one_layer
