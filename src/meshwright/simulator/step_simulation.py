"""Simulates the step of a Plan: the executor's schedule with times of the cost model, as a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import TypeVar

from meshwright.costs.plan_costs import Pricing, as_nodes, number, pricing
from meshwright.schedules.activation_residency import Counts, fullest_moments
from meshwright.schedules.plan_schedule import kept_order, schedule_key, stages_of, training_schedule, unit_strategies
from meshwright.schedules.schedule import Placement, channels, rank_of
from meshwright.simulator.links import links_of
from meshwright.simulator.simulate import simulate
from meshwright.simulator.slow_nodes import rank_prices
from meshwright.simulator.stage_simulation import Program, compile_program
from meshwright.simulator.timeline import Timeline
from meshwright.simulator.timing import Table, Timing
from meshwright.simulator.units import Seconds, Unit, UnitCosts
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.workload.activations import activation_bytes
from meshwright.workload.groups import shard_size
from meshwright.workload.plan_bytes import memory_by_rank, optimizer_on_host

T = TypeVar("T")
REPEATING_SCHEDULES = ("1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v")
"""Schedules that hold no more of more micro-batches, once there are `PAST_FILLING` for each rank."""
PAST_FILLING = 3


def simulate_plan(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> Timeline:
    """One step of `plan` on `cluster`, by pipeline rank.

    Raises BadInput where the cost model says nothing (a device neither known nor measured, a format it lacks), and when the schedule
    cannot be made for the plan's micro-batches and stages.
    """
    return simulate(training_schedule(plan, model.layers), timing_of(model, train, plan, cluster))


def stage_program(plan: Plan, layers: int) -> Program:
    """The plan's schedule for `simulate_stages`: by units if all micro-batches run through each.

    Raises BadInput as `training_schedule`.
    """
    key = schedule_key(plan, layers)
    return _program_of(key, tuple(map(len, unit_strategies(plan, layers))) if plan.layered else ())


@lru_cache(maxsize=64)
def _program_of(key: tuple[str, int, int, int], units: tuple[int, ...]) -> Program:
    return compile_program(kept_order(*key), key[2], units)


def units_of(model: ModelSpec, stage: range) -> list[Unit]:
    """The units of one stage, in forward order."""
    first: list[Unit] = ["embed"] if stage.start == 0 else []
    last: list[Unit] = ["head"] if stage.stop == model.layers else []
    return [*first, *stage, *last]


def memory_of(model: ModelSpec, train: TrainSpec, plan: Plan, *, cpu: bool) -> tuple[dict[str, int], ...]:
    """Bytes by kind of every pipeline rank, with as many forwards alive as the plan's schedule holds. Raises BadInput as
    `training_schedule` does."""
    return _memory_of(model, train, plan.without_prediction, cpu)


@lru_cache(maxsize=256)  # a search asks whether a plan fits, and then how much it takes
def _memory_of(model: ModelSpec, train: TrainSpec, plan: Plan, cpu: bool) -> tuple[dict[str, int], ...]:
    alive = _peaks(plan, model.layers, activation_bytes(model, train, plan))
    return memory_by_rank(model, train, plan, cpu=cpu, alive=alive)


def _peaks(plan: Plan, layers: int, left: Sequence[float]) -> list[float]:
    """By pipeline rank, the most that forwards leave for backwards; `left` by stage."""
    name, ranks, micro_batches, per_rank = schedule_key(plan, layers)
    if name in REPEATING_SCHEDULES and micro_batches % ranks == 0:
        micro_batches = min(micro_batches, PAST_FILLING * ranks)
    moments, placement = _moments(name, ranks, micro_batches, per_rank)
    return [
        max(sum(count * left[stage] for count, stage in zip(counts, stages, strict=True)) for counts in rank)
        for rank, stages in zip(moments, placement, strict=True)
    ]


@lru_cache(maxsize=256)
def _moments(name: str, ranks: int, micro_batches: int, per_rank: int) -> tuple[Counts, Placement]:
    order = kept_order(name, ranks, micro_batches, per_rank)
    return fullest_moments(order), order[0]


def host_bytes(model: ModelSpec, train: TrainSpec, plan: Plan, nodes: int) -> tuple[float, float]:
    """Bytes of a node's memory for offloaded activations and for offloaded optimizer state, of the fullest node.

    Raises BadInput as `training_schedule` does.
    """
    return _activations_on_host(model, train, plan.without_prediction, nodes), optimizer_on_host(model, plan, nodes)


@lru_cache(maxsize=256)
def _activations_on_host(model: ModelSpec, train: TrainSpec, plan: Plan, nodes: int) -> float:
    left = activation_bytes(model, train, plan, host_offloaded=True)
    if not any(left):
        return 0.0
    rows = _peaks(plan, model.layers, left)
    apart = any(axis.axis == "pipeline" and axis.crosses == "node" for axis in plan.mesh)
    return (max(rows) if apart else sum(rows) / len(rows)) * plan.ranks / nodes


def timing_of(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> Timing:
    """How long every action of the plan takes, by the cost model. Raises BadInput where it says nothing."""
    cluster = as_nodes(cluster)
    priced = priced_or_refused(model, train, plan, cluster)
    name, depth, many, per_rank = schedule_key(plan, model.layers)
    placement, _ = kept_order(name, depth, min(many, PAST_FILLING * depth), per_rank)  # however many there are
    prices = [rank or priced for rank in rank_prices(model, train, plan, cluster)]
    held = rank_of(placement)
    stages = [units_of(model, stage) for stage in stages_of(plan, model.layers)]
    made = {id(one): UnitCosts(model, plan, one, tied_apart=held[0] != held[-1]) for one in prices}
    ranks = [made[id(one)] for one in prices]  # one object for all ranks on nodes alike

    kinds = [tuple(map(ranks[0].alike, stage)) for stage in stages]

    def table(price: Callable[[UnitCosts, Unit], T]) -> list[list[T]]:
        """Of every unit; units alike on ranks alike are priced once."""
        known = cache(price)
        row = cache(lambda costs, units: [known(costs, unit) for unit in units])
        return [list(row(ranks[rank], units)) for rank, units in zip(held, kinds, strict=True)]

    compute = table(UnitCosts.compute)
    # A rank's host time of one micro-batch is booked where its first stage begins.
    for costs, stages_held in zip(ranks, placement, strict=True):
        first = compute[stages_held[0]]
        inside = {**first[0].inside, "host": first[0].inside.get("host", 0.0) + costs.host_micro}
        first[0] = replace(first[0], forward=first[0].forward + costs.host_micro, inside=inside)
    sharded, replicated = shard_size(plan) > 1, plan.axis_size("replicate") > 1
    size = number(priced.layout.micro_batch * priced.layout.seq / priced.layout.context / priced.layout.tensor)
    return Timing(
        forward=_column(compute, "forward"),
        backward_input=_column(compute, "backward_input"),
        backward_weight=_column(compute, "backward_weight"),
        boundary_bytes=[size * model.hidden * 2] * (len(stages) - 1),
        links=links_of(plan, cluster, prices, channels(placement)),
        unshard=table(UnitCosts.gather) if sharded else (),
        reduce=table(UnitCosts.reduce) if sharded else (),
        replicate=table(UnitCosts.replicate) if replicated else (),
        copy_out=table(UnitCosts.copy_out),
        copy_in=table(UnitCosts.copy_in),
        accumulate=table(UnitCosts.accumulate),
        single_reduce_buffer=True,
        shared_communicator=plan.gather_engine == "kernel",
        gather_slowdown=max(costs.slowdown("gather") for costs in ranks),
        reduce_slowdown=max(costs.slowdown("reduce") for costs in ranks),
        replicate_slowdown=max(costs.slowdown("replicate") for costs in ranks),
        tied_gradient_seconds=max(costs.tied_sum() for costs in ranks),
        norm_seconds=max(costs.constant for costs in ranks),
        optim_seconds=[
            costs.optimizer([unit for stage in row for unit in stages[stage]])
            for costs, row in zip(ranks, placement, strict=True)
        ],
        inside=_inside(compute, plan.batch.accumulate / len(ranks)),
    )


def inside_compute(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> dict[str, float]:
    """Exposed seconds inside a step's compute, mean over pipeline ranks.

    Communication of tensor, context and expert ranks and with host memory, and waits for the host's launches.
    """
    return dict(timing_of(model, train, plan, cluster).inside)


def _inside(compute: Sequence[Sequence[Seconds]], times: float) -> dict[str, float]:
    """`times` what is inside one micro-batch's compute, by name; none that is nothing."""
    totals: dict[str, float] = {}
    for row in compute:
        for one in row:
            for axis, seconds in one.inside.items():
                totals[axis] = totals.get(axis, 0.0) + times * seconds
    return {axis: seconds for axis, seconds in totals.items() if seconds}


def priced_or_refused(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> Pricing:
    """The cost model's inputs. Raises BadInput where it says nothing."""
    priced = pricing(model, train, plan, cluster)
    if priced is None:
        asked = f"{cluster.gpu} in {plan.precision.products}"
        known = ", ".join(name for name, chip in CHIPS.items() if "bf16" in chip.peak_flops)
        raise BadInput(
            f"the cost model has no figures for {asked}; it knows bf16 on {known}. "
            "Ask about one of those (cluster.gpu=H200 cluster.gpus_per_node=8), or measure this one with `meshwright profile --out FILE`"
        )
    return priced


def _column(by_stage: Sequence[Sequence[Seconds]], name: str) -> Table:
    return [[getattr(seconds, name) for seconds in stage] for stage in by_stage]
