"""Sizes of slots and times of samples in a plan for samples of different lengths, and the run that the planner searches
instead.

A slot is the space for tokens that one rank has in a micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.costs.constants import OWN, constants
from meshwright.costs.machine_rates import chip_of, machine_of, with_measurements
from meshwright.costs.plan_costs import matmul_dtype
from meshwright.planner.candidate import compiles, pins_of, slot_run
from meshwright.planner.sample_plans import always_exchanges, hybrid_exchange, ring_seconds
from meshwright.planner.slot_offloads import with_slot_offload
from meshwright.simulator.sample_times import time_with_constants
from meshwright.spec.hybrid import exchanged_heads, least_capacity
from meshwright.spec.job import planned_sequences
from meshwright.spec.plan import Plan, Precision, SamplePlan
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import RunSpec

TILE = 128
"""Longer slots are a multiple of this number of tokens."""


def searched_run(run: RunSpec) -> RunSpec:
    """Return the run for which the planner searches a plan.

    For a run with samples of different lengths it has full slots instead of samples, and only data ranks. Other runs
    are returned unchanged.
    """
    tokens = run.train.global_batch_tokens
    pins = pins_of(run)
    if tokens is None:
        return run
    if pins.hybrid is not None:
        return _searched_hybrid(run, tokens, pins)
    sequences = planned_sequences(tokens, run.train.seq_len, run.cluster.ranks)
    pins = replace(pins, micro_batch=1, pipeline=1, context_ring=1, context_ulysses=1, tensor=1)
    return replace(run, train=replace(run.train, global_batch=sequences), plan=pins)


def _searched_hybrid(run: RunSpec, tokens: int, pins: PlanKeys) -> RunSpec:
    """Return the run for pinned hybrid ranks: their slots are sequences of shard ranks, which have the same weights and
    matmuls.
    """
    ranks = pins.hybrid or 1
    tensor = pins.tensor or 1
    schedule = pins.schedule or "1f1b"
    capacity = pins.capacity or _capacity(ranks, tensor, run.train.seq_len)
    pins = replace(
        pins,
        hybrid=None,
        capacity=None,
        offload_capacity=None,
        hybrid_attention=None,
        shard=ranks,
        replicate=1,
        pipeline=pins.pipeline or max(1, len(pins.stages or ())),
        context_ring=1,
        context_ulysses=1,
        tensor=tensor,
        micro_batch=1,
        schedule=schedule,
    )
    # Longer slots with offload need no more memory only if nothing else is offloaded.
    if pins_of(run).offload_capacity is not None:
        pins = replace(pins, offload=pins.offload or "none")
    if schedule != "breadth_first":
        pins = replace(pins, reshard=False, gradients="whole")
    sequences = planned_sequences(tokens, capacity, ranks)
    return replace(run, train=replace(run.train, seq_len=capacity, global_batch=sequences), plan=pins)


def _capacity(ranks: int, tensor: int, longest: int) -> int:
    """Return the number of tokens of the smallest slots that hold the longest sample.

    If they are long enough, they are rounded up to whole tiles of matmuls. A sample of 10,000 tokens takes 2,500 tokens
    of each of 4 ranks, which are rounded up to 20 tiles of 128:

    >>> _capacity(ranks=4, tensor=1, longest=10_000)
    2560
    """
    least = least_capacity(ranks, tensor, longest)
    return least if least < TILE else -(-least // math.lcm(TILE, tensor)) * math.lcm(TILE, tensor)


def with_hybrid_axis(run: RunSpec, plan: Plan) -> Plan:
    """Return a plan of `searched_run` with the pinned hybrid ranks instead of its shard ranks, and with the pinned
    offload of long slots.
    """
    ranks = pins_of(run).hybrid or 1
    plan = with_slot_offload(run, plan)
    if ranks == 1 or plan.samples is None:
        return plan
    mesh = tuple(replace(axis, axis="hybrid") if axis.axis == "shard" else axis for axis in plan.mesh)
    exchange = hybrid_exchange(run, ranks, exchanged_heads(run.model.kv_heads, plan.axis_size("tensor")))
    samples = replace(
        plan.samples,
        ring=ring_seconds(slot_run(run, plan), plan),
        exchange=None if math.isinf(exchange) else exchange,
        always_exchange=always_exchanges(run),
    )
    return replace(plan, mesh=mesh, samples=samples)


def sample_plan(run: RunSpec, precision: Precision) -> SamplePlan | None:
    """Return slots that hold the longest sample, and the times of samples by the cost model.

    The result is None if all samples have equal length.

    A sample of n tokens takes alpha · n² + beta · n + gamma seconds. Only the ratios of these times matter: they decide
    on which rank a sample is computed.
    """
    if run.data.packing != "none":
        return None
    capacity = run.train.seq_len + run.train.seq_len % 2
    chip = chip_of(run.cluster)
    matmuls = matmul_dtype(precision, run.cluster)
    fitted = constants(chip.generation if chip else "default", OWN)
    measured, machine = with_measurements(fitted, machine_of(run.cluster, matmuls), run.cluster, matmuls)
    time = time_with_constants(run.model, machine, measured, capacity)
    return SamplePlan(
        capacity=capacity,
        alpha=max(time.quadratic, 0.0),
        beta=max(time.linear, 0.0),
        gamma=max(time.fixed, 0.0),
        slot_unit=math.lcm(2, pins_of(run).tensor or 1) if run.cluster.is_cpu and not compiles(run) else None,
    )
