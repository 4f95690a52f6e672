"""A Plan played before it is run: the schedule that the executor plays too, what each action takes by the cost model, and the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.costs.memory import activation_bytes, memory_by_rank
from meshwright.costs.of_plan import Pricing, as_nodes, number, pricing, shard_size
from meshwright.schedules.memory import peak_in_flight
from meshwright.schedules.of_plan import stage_schedule, stages_of, training_schedule
from meshwright.simulator.links import links_of
from meshwright.simulator.simulate import simulate
from meshwright.simulator.slow_nodes import rank_slowdown
from meshwright.simulator.timeline import Timeline
from meshwright.simulator.timing import Table, Timing
from meshwright.simulator.units import Seconds, Unit, UnitCosts
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan


def simulate_plan(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> Timeline:
    """One step of `plan` on `cluster`, by pipeline rank.

    Raises BadInput where the cost model says nothing (CPU ranks, an unknown chip or format) and when the schedule cannot be made for the
    plan's micro-batches and stages.
    """
    return simulate(training_schedule(plan, model.layers), timing_of(model, train, plan, cluster))


def units_of(model: ModelSpec, stage: range) -> list[Unit]:
    """The units of one stage, in forward order."""
    first: list[Unit] = ["embed"] if stage.start == 0 else []
    last: list[Unit] = ["head"] if stage.stop == model.layers else []
    return [*first, *stage, *last]


def memory_of(model: ModelSpec, train: TrainSpec, plan: Plan, *, cpu: bool) -> tuple[dict[str, int], ...]:
    """Bytes by kind of every pipeline rank, with as many forwards alive as the plan's schedule holds. Raises BadInput as
    `training_schedule` does."""
    alive = peak_in_flight(stage_schedule(plan, model.layers), activation_bytes(model, train, plan))
    return memory_by_rank(model, train, plan, cpu=cpu, alive=alive)


def timing_of(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> Timing:
    """How long every action of the plan takes, by the cost model. Raises BadInput where it says nothing."""
    cluster = as_nodes(cluster)
    priced = priced_or_refused(model, train, plan, cluster)
    schedule = stage_schedule(plan, model.layers)
    held = schedule.rank_of
    stages = [units_of(model, stage) for stage in stages_of(plan, model.layers)]
    costs = UnitCosts(model, plan, priced, tied_apart=held[0] != held[-1])
    compute = [[costs.compute(unit) for unit in row] for row in stages]
    for stages_held in schedule.placement:  # a rank's host time of one micro-batch, booked where its first stage begins
        first = compute[stages_held[0]]
        first[0] = replace(first[0], forward=first[0].forward + costs.host_micro)
    sharded, replicated = shard_size(plan) > 1, plan.axis_size("replicate") > 1
    size = number(priced.layout.micro_batch * priced.layout.seq / priced.layout.context / priced.layout.tensor)
    return Timing(
        forward=_column(compute, "forward"),
        backward_input=_column(compute, "backward_input"),
        backward_weight=_column(compute, "backward_weight"),
        boundary_bytes=[size * model.hidden * 2] * (len(stages) - 1),
        links=links_of(plan, cluster, priced, schedule.channels),
        unshard=[[costs.gather(unit) for unit in row] for row in stages] if sharded else (),
        reduce=[[costs.reduce(unit) for unit in row] for row in stages] if sharded else (),
        replicate=[[costs.replicate(unit) for unit in row] for row in stages] if replicated else (),
        collective_slowdown=1 / (1 - min(number(priced.constants.overlap_tax), 0.5)),
        rank_slowdown=rank_slowdown(model, train, plan, cluster),
        norm_seconds=costs.constant,
        optim_seconds=[_optimizer(costs, plan, [stages[s] for s in row]) for row in schedule.placement],
    )


def inside_compute(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> dict[str, float]:
    """Seconds of a step's compute that are exposed tensor and context communication, mean over pipeline ranks."""
    costs = UnitCosts(model, plan, priced_or_refused(model, train, plan, as_nodes(cluster)))
    blocks = [costs.compute(layer).inside for layer in range(model.layers)]
    share = plan.batch.accumulate / plan.axis_size("pipeline")
    totals = {axis: share * sum(block[axis] for block in blocks) for axis in ("tensor", "context")}
    return {axis: seconds for axis, seconds in totals.items() if seconds}


def priced_or_refused(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> Pricing:
    """The cost model's inputs. Raises BadInput where it says nothing."""
    priced = pricing(model, train, plan, cluster)
    if priced is None:
        asked = f"{cluster.gpu} in {plan.precision.compute}"
        known = ", ".join(name for name, chip in CHIPS.items() if "bf16" in chip.peak_flops)
        raise BadInput(
            f"the cost model has no figures for {asked}; it knows bf16 on {known}. "
            "Ask about one of those: cluster.gpu=H200 cluster.gpus_per_node=8"
        )
    return priced


def _optimizer(costs: UnitCosts, plan: Plan, stages: Sequence[Sequence[Unit]]) -> float:
    units = [unit for row in stages for unit in row]
    owned = sum(costs.count(unit) for unit in units) / shard_size(plan)
    return costs.optimizer(owned, sum(isinstance(unit, int) for unit in units))


def _column(rows: Sequence[Sequence[Seconds]], name: str) -> Table:
    return [[getattr(one, name) for one in row] for row in rows]
