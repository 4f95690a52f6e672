"""Simulates one training step of a Plan: the schedule that the executor runs, with durations from the cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import TypeVar

from meshwright.costs.plan_costs import Pricing, as_nodes, number, pricing
from meshwright.schedules.activation_residency import ForwardCounts, peak_candidates
from meshwright.schedules.plan_schedule import (
    cached_compute_order,
    schedule_key,
    stages_of,
    training_schedule,
    unit_strategies,
)
from meshwright.schedules.schedule import Placement, channels, rank_of
from meshwright.simulator.copied_experts import with_copies
from meshwright.simulator.links import links_of
from meshwright.simulator.simulate import simulate
from meshwright.simulator.slow_nodes import rank_cost_inputs
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
from meshwright.workload.plan_bytes import gradient_sums_on_host, memory_by_rank, optimizer_on_host

T = TypeVar("T")
REPEATING_SCHEDULES = ("1f1b", "interleaved", "zb_h1", "zbv", "paired")
"""Schedules whose peak of micro-batches in flight is the same for all numbers of micro-batches from a certain one on.

That number is `SATURATING_MICRO_BATCHES` times the number of pipeline ranks.
"""
SATURATING_MICRO_BATCHES = 4


def simulate_plan(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> Timeline:
    """Simulate one step of `plan` on `cluster`. Each pipeline rank stands for all devices that share its stages.

    Raises BadInput if the cost model has no figures for the device or the dtype, and if the schedule does not support the plan's
    numbers of micro-batches and stages.
    """
    return simulate(training_schedule(plan, model.layers), timing_of(model, train, plan, cluster))


def stage_program(plan: Plan, layers: int) -> Program:
    """Return the plan's schedule as a Program for `simulate_stages`.

    In layered order all micro-batches of a stage run through a unit before the next unit, so the actions of the Program are units. In
    other orders its actions are whole stages.

    Raises BadInput as `training_schedule` does.
    """
    key = schedule_key(plan, layers)
    return _cached_program(key, tuple(map(len, unit_strategies(plan, layers))) if plan.layered else ())


@lru_cache(maxsize=64)
def _cached_program(key: tuple[str, int, int, int], units: tuple[int, ...]) -> Program:
    return compile_program(cached_compute_order(*key), key[2], units)


def units_of(model: ModelSpec, stage: range) -> list[Unit]:
    """Return the units of one stage in forward order: blocks, with the embedding in the first stage and the head in the last one."""
    first: list[Unit] = ["embed"] if stage.start == 0 else []
    last: list[Unit] = ["head"] if stage.stop == model.layers else []
    return [*first, *stage, *last]


def memory_of(model: ModelSpec, train: TrainSpec, plan: Plan, *, cpu: bool) -> tuple[dict[str, int], ...]:
    """Return for each pipeline rank the bytes of each memory category, at the moment of the schedule with the most activations.

    `cpu`: the ranks are CPU processes. Raises BadInput as `training_schedule` does.
    """
    return _memory_of(model, train, plan.without_prediction, cpu)


@lru_cache(maxsize=4096)  # a search needs results again: whether a plan fits, its bytes, and ends that layouts share
def _memory_of(model: ModelSpec, train: TrainSpec, plan: Plan, cpu: bool) -> tuple[dict[str, int], ...]:
    peaks = _activation_peaks(plan, model.layers, activation_bytes(model, train, plan))
    return memory_by_rank(model, train, plan, cpu=cpu, activation_peaks=peaks)


def _activation_peaks(plan: Plan, layers: int, stage_bytes: Sequence[float]) -> list[float]:
    """Return the peak bytes of activations of each pipeline rank. `stage_bytes` are those of one micro-batch in each stage."""
    name, ranks, micro_batches, per_rank = schedule_key(plan, layers)
    if name in REPEATING_SCHEDULES and micro_batches % ranks == 0:
        micro_batches = min(micro_batches, SATURATING_MICRO_BATCHES * ranks)
    candidates, placement = _peak_candidates(name, ranks, micro_batches, per_rank)
    return [
        max(
            sum(count * stage_bytes[stage] for count, stage in zip(counts, stages, strict=True))
            for counts in rank_candidates
        )
        for rank_candidates, stages in zip(candidates, placement, strict=True)
    ]


@lru_cache(maxsize=256)
def _peak_candidates(name: str, ranks: int, micro_batches: int, per_rank: int) -> tuple[ForwardCounts, Placement]:
    order = cached_compute_order(name, ranks, micro_batches, per_rank)
    return peak_candidates(order), order[0]


def host_bytes(model: ModelSpec, train: TrainSpec, plan: Plan, nodes: int) -> tuple[float, float, float]:
    """Return the bytes of host memory on the node that needs the most: (offloaded activations, optimizer state, gradient sums).

    Raises BadInput as `training_schedule` does.
    """
    plan = plan.without_prediction
    return (
        _activations_on_host(model, train, plan, nodes) + _slots_on_host(model, train, plan, nodes),
        optimizer_on_host(model, plan, nodes),
        gradient_sums_on_host(model, plan, nodes),
    )


def _slots_on_host(model: ModelSpec, train: TrainSpec, plan: Plan, nodes: int) -> float:
    """Return the bytes of host memory per node for the activations of balanced samples whose micro-batches (slots) are offloaded.

    The bytes of a slot are computed for `train.seq_len` tokens, and scaled to the tokens of a slot with offload. In layered order all
    slots of a step are in host memory at the same time.
    """
    samples = plan.samples
    if samples is None or samples.offload is None:
        return 0.0
    every_layer = replace(plan, layers=tuple(replace(layer, offload="activations") for layer in plan.layers))
    slot_bytes = sum(activation_bytes(model, train, every_layer, host_offloaded=True))
    slots = max(samples.offload.capacity / samples.capacity, plan.batch.accumulate if plan.layered else 1)
    return slot_bytes * samples.offload.layers / model.layers * slots * plan.ranks / nodes


@lru_cache(maxsize=256)
def _activations_on_host(model: ModelSpec, train: TrainSpec, plan: Plan, nodes: int) -> float:
    stage_bytes = activation_bytes(model, train, plan, host_offloaded=True)
    if not any(stage_bytes):
        return 0.0
    peaks = _activation_peaks(plan, model.layers, stage_bytes)
    stages_on_own_nodes = any(axis.axis == "pipeline" and axis.crosses == "node" for axis in plan.mesh)
    return (max(peaks) if stages_on_own_nodes else sum(peaks) / len(peaks)) * plan.ranks / nodes


def timing_of(
    model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec, *, assumed: Pricing | None = None
) -> Timing:
    """Return the durations of the plan's actions by the cost model. Raises BadInput if it has no figures for device or dtype.

    `assumed` replaces the cost model's inputs on all ranks. It answers how fast the step would be with features that this program lacks.
    """
    cluster = as_nodes(cluster)
    cost_inputs = assumed or require_cost_inputs(model, train, plan, cluster)
    name, depth, micro_batches, per_rank = schedule_key(plan, model.layers)
    # The placement does not depend on the number of micro-batches.
    placement, _ = cached_compute_order(name, depth, min(micro_batches, SATURATING_MICRO_BATCHES * depth), per_rank)
    by_rank: list[Pricing] = [cost_inputs] * depth
    if cluster.groups and not assumed:
        by_rank = [inputs or cost_inputs for inputs in rank_cost_inputs(model, train, plan, cluster)]
    stage_ranks = rank_of(placement)
    stages = [units_of(model, stage) for stage in stages_of(plan, model.layers)]
    tied_copies = stage_ranks[0] != stage_ranks[-1]
    # Ranks on equal nodes share one `Pricing` object, and so one `UnitCosts`.
    unit_costs = {id(inputs): UnitCosts(model, plan, inputs, tied_copies=tied_copies) for inputs in by_rank}
    ranks = [unit_costs[id(inputs)] for inputs in by_rank]
    representatives = [tuple(map(ranks[0].representative, stage)) for stage in stages]

    def table(price: Callable[[UnitCosts, Unit], T]) -> list[list[T]]:
        """Return `price` for each stage and unit. It is called only once for equal units on equal ranks."""
        unit_price = cache(price)
        stage_prices = cache(lambda costs, units: [unit_price(costs, unit) for unit in units])
        return [
            list(stage_prices(ranks[rank], units)) for rank, units in zip(stage_ranks, representatives, strict=True)
        ]

    compute = table(UnitCosts.compute)
    # The host time of a micro-batch belongs to no unit, so it is added to the first unit of each rank.
    for costs, rank_stages in zip(ranks, placement, strict=True):
        units = compute[rank_stages[0]]
        exposed = {**units[0].exposed, "host": units[0].exposed.get("host", 0.0) + costs.host_seconds}
        units[0] = replace(units[0], forward=units[0].forward + costs.host_seconds, exposed=exposed)
    sharded = shard_size(plan) > 1
    replicated = plan.axis_size("replicate") > 1
    layout = cost_inputs.layout
    tokens = number(layout.micro_batch * layout.seq / layout.context / layout.tensor)
    return Timing(
        forward=_table(compute, "forward"),
        backward_input=_table(compute, "backward_input"),
        backward_weight=_table(compute, "backward_weight"),
        boundary_bytes=[tokens * model.hidden * 2] * (len(stages) - 1),
        links=links_of(plan, cluster, by_rank, channels(placement)),
        unshard=table(UnitCosts.gather) if sharded else (),
        reduce=table(UnitCosts.reduce) if sharded else (),
        replicate=table(UnitCosts.replicate) if replicated else (),
        copy_out=table(UnitCosts.copy_out),
        copy_in=table(UnitCosts.copy_in),
        accumulate=table(UnitCosts.accumulate),
        single_reduce_buffer=True,
        shared_communicator=plan.gather_transport == "nccl",
        gather_slowdown=max(costs.slowdown("gather") for costs in ranks),
        reduce_slowdown=max(costs.slowdown("reduce") for costs in ranks),
        replicate_slowdown=max(costs.slowdown("replicate") for costs in ranks),
        tied_gradient_seconds=max(costs.tied_gradient() for costs in ranks),
        norm_seconds=max(costs.fixed_seconds for costs in ranks),
        optim_seconds=[
            costs.optimizer([unit for stage in rank_stages for unit in stages[stage]])
            for costs, rank_stages in zip(ranks, placement, strict=True)
        ],
        exposed_in_compute=_total_exposed(compute, plan.batch.accumulate / len(ranks)),
    )


def exposed_in_compute(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> dict[str, float]:
    """Return the waits that the compute seconds of a step include, by cause (`units.Seconds.exposed`), mean over pipeline ranks.

    The causes are tensor, context and expert communication, copies to and from host memory, and kernel launches (`host`).
    """
    return dict(timing_of(model, train, plan, cluster).exposed_in_compute)


def _total_exposed(compute: Sequence[Sequence[Seconds]], factor: float) -> dict[str, float]:
    """Add the exposed seconds of all units by axis, and multiply them by `factor`. Axes with 0 seconds are left out.

    Four micro-batches pass through two units, which wait 0.25 and 0.5 seconds for tensor ranks: 4 · 0.75 = 3 seconds:

    >>> stage = [Seconds(1.0, 1.0, 1.0, {"tensor": 0.25}), Seconds(1.0, 1.0, 1.0, {"tensor": 0.5, "host": 0.0})]
    >>> _total_exposed([stage], 4)
    {'tensor': 3.0}
    """
    totals: dict[str, float] = {}
    for stage in compute:
        for unit in stage:
            for axis, seconds in unit.exposed.items():
                totals[axis] = totals.get(axis, 0.0) + factor * seconds
    return {axis: seconds for axis, seconds in totals.items() if seconds}


def require_cost_inputs(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: ClusterSpec) -> Pricing:
    """Return the cost model's inputs for a plan. Raises BadInput if it has no figures for the device or the dtype."""
    cost_inputs = with_copies(pricing(model, train, plan, cluster), model, train, plan, cluster)
    if cost_inputs is None:
        device = f"{cluster.gpu} in {plan.precision.matmuls}"
        known = ", ".join(name for name, chip in CHIPS.items() if "bf16" in chip.peak_flops)
        raise BadInput(
            f"the cost model has no figures for {device}; it knows bf16 on {known}. "
            "Choose one of those (cluster.gpu=H200 cluster.gpus_per_node=8), or measure this device with `meshwright profile --out FILE`"
        )
    return cost_inputs


def _table(by_stage: Sequence[Sequence[Seconds]], name: str) -> Table:
    return [[getattr(seconds, name) for seconds in stage] for stage in by_stage]
