"""Divides a model's layers into the stages of a schedule."""

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
    """The schedule with its stages: as pinned, or else balanced by time.

    The last stage also has the head. On unlike nodes a pipeline rank gets layers in proportion to its speed, which follows from its nodes
    under `mesh`.

    Raises ValueError as `stage_table` does: for pinned stages that are not in the schedule's order.
    """
    layers = run.model.layers
    pins = pins_of(run)
    if pins.stages:
        table = stage_table(SchedulePlan(name=name, stages=pins.stages), pipeline, layers)
    else:
        speeds = _speeds(run, mesh)
        if (
            speeds and name == "breadth_first"
        ):  # one layer per stage on the slowest rank; faster ranks get more in proportion
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
    """The stages of `table`, or others if by the FLOPs of unlike layers their slowest rank takes less time."""
    model = run.model
    seq = run.train.seq_len
    of_kinds = [block_flops_per_token(block, seq, causal=True) for block in model.block_kinds]
    flops = [of_kinds[model.kind(layer)] for layer in range(model.layers)]
    mean = sum(flops) / len(flops)
    head = _flops_of_head_and_block(run)[0] / mean
    return balanced_by_weight(table, tuple(layer / mean for layer in flops), head, speeds or (1.0,) * len(table))


def _speeds(run: RunSpec, mesh: tuple[MeshAxis, ...]) -> tuple[float, ...]:
    """Relative speed of each pipeline rank; empty where nodes are alike."""
    if not run.cluster.groups or not mesh:
        return ()
    layout = Layout(tuple((axis.axis, axis.size) for axis in mesh), run.cluster.ranks_per_node)
    return rank_speeds(node_type_speeds(run.model, run.train, run.cluster), run.cluster, layout)


def head_in_layers(run: RunSpec) -> float:
    """FLOPs of the output head, in units of one block's FLOPs."""
    head, block = _flops_of_head_and_block(run)
    return head / block


def _flops_of_head_and_block(run: RunSpec) -> tuple[float, float]:
    """FLOPs of a token in the head with prediction modules, and in a block as the model's own keys describe it.

    If one layer and the head take 14 FLOPs, and two layers and the head 24, the head takes 4 and a block 10:

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
