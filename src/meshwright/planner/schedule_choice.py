"""A schedule with its stages written out."""

from __future__ import annotations

from dataclasses import replace

from meshwright.planner.candidate import pins_of
from meshwright.simulator.slow_nodes import kind_speeds, rank_speeds
from meshwright.spec.layout import Layout, balanced_stages, stage_table
from meshwright.spec.model import flops_per_token
from meshwright.spec.plan import MeshAxis, ScheduleName, SchedulePlan
from meshwright.spec.run import RunSpec


def with_stages(
    run: RunSpec, name: ScheduleName, pipeline: int, per_rank: int, mesh: tuple[MeshAxis, ...] = ()
) -> SchedulePlan:
    """The schedule with its stages: those pinned, or else cut by time.

    The last stage also has the head. On unlike nodes a pipeline rank gets layers by its speed, which follows from where `mesh` puts it.

    Raises ValueError as `stage_table` does: for pinned stages that are not in the schedule's order.
    """
    layers, pins = run.model.layers, pins_of(run)
    if pins.stages:
        table = stage_table(SchedulePlan(name=name, stages=pins.stages), pipeline, layers)
    else:
        speeds = _speeds(run, mesh)
        if (
            speeds and name == "breadth_first"
        ):  # a layer a stage on the slowest rank, as many on others as they do in its time
            per_rank = max(1, int(layers * min(speeds) / sum(speeds)))
        table = balanced_stages(name, pipeline, layers, head_in_layers(run), per_rank, speeds)
    if len(table) == len(table[0]) == 1:
        return SchedulePlan(name=name)
    return SchedulePlan(name=name, stages=tuple(tuple(f"{s.start}-{s.stop - 1}" for s in row) for row in table))


def _speeds(run: RunSpec, mesh: tuple[MeshAxis, ...]) -> tuple[float, ...]:
    """Layers a second by pipeline rank, relative; empty where nodes are alike."""
    if not run.cluster.groups or not mesh:
        return ()
    layout = Layout(tuple((axis.axis, axis.size) for axis in mesh), run.cluster.ranks_per_node)
    return rank_speeds(kind_speeds(run.model, run.train, run.cluster), run.cluster, layout)


def head_in_layers(run: RunSpec) -> float:
    """How many blocks' arithmetic the head makes."""
    model, seq = run.model, run.train.seq_len
    one, two = (flops_per_token(replace(model, layers=layers), seq, causal=True) for layers in (1, 2))
    return (2 * one - two) / (two - one)
