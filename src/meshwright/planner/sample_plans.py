"""Makes plans for layouts of samples with different lengths, and predicts the times of their micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from meshwright.costs.collective_costs import link_rate, port_rate
from meshwright.costs.layer_costs import context_traffic
from meshwright.costs.machine_rates import unpredicted_message
from meshwright.costs.plan_costs import Pricing, as_nodes, number, pricing
from meshwright.planner.candidate import compiles, pins_of, precision_of
from meshwright.planner.reprice import reprice
from meshwright.simulator.sample_layouts import LayoutTimes, SampleLayout
from meshwright.simulator.sample_steps import RingTime
from meshwright.simulator.sample_times import time_with_constants
from meshwright.spec.errors import BadInput
from meshwright.spec.layout import with_node_crossings
from meshwright.spec.plan import RECOMPUTE_MODES, AxisName, BatchPlan, ExpertPlan, LayerStrategy, MeshAxis, Plan
from meshwright.spec.run import RunSpec
from meshwright.workload.layer_messages import context_messages
from meshwright.workload.step_shape import step_shape

GRADIENT_BYTES = 4.0
"""Bytes per element of the gradients of keys and values that a ring sends."""
REPEATED_EXCHANGES = 1.5
"""Bytes that hybrid ranks exchange, relative to static Ulysses ranks: their backward repeats the exchanges of the
forward.
"""
EXCHANGED_TOKENS = 4096
"""Number of tokens on a rank for which the time of this exchange is computed."""


def plan_of(
    run: RunSpec, layout: SampleLayout, strategy: LayerStrategy, micro_batches: int = 1
) -> tuple[RunSpec, Plan]:
    """Return a plan of full micro-batches for a layout, and the run with its batch.

    All layers have the strategy `strategy`.

    In the plan, hybrid ranks do not divide samples: each rank has one sample, whose tokens fill a micro-batch.
    """
    sizes: tuple[tuple[AxisName, int], ...] = (
        ("shard", layout.ranks // layout.context),
        ("context_ring", layout.ring),
        ("context_ulysses", layout.ulysses),
    )
    groups = layout.ranks // layout.context
    batch = BatchPlan(global_batch=groups * micro_batches, micro_batch=1, accumulate=micro_batches)
    train = replace(run.train, seq_len=layout.capacity * layout.context, global_batch=batch.global_batch)
    plan = Plan(
        mesh=tuple(MeshAxis(axis=axis, size=size) for axis, size in sizes if size > 1 or axis == "shard"),
        batch=batch,
        layers=(strategy,),
        precision=precision_of(run),
        compile=compiles(run),
        experts=ExpertPlan(expert=1, expert_shard=layout.ranks) if run.model.experts else None,
    )
    return replace(run, train=train), with_node_crossings(plan, run.cluster.ranks_per_node)


def layout_times(run: RunSpec, layout: SampleLayout, strategy: LayerStrategy) -> LayoutTimes:
    """Return the times of the layout's micro-batches, if all layers have the strategy `strategy`.

    The time of a step outside its samples is found by simulating plans with one and with two micro-batches, and
    subtracting the time of their samples. Raises BadInput if the rates of the device are unknown.
    """
    changed, plan = plan_of(run, layout, strategy)
    priced = pricing(changed.model, changed.train, plan, run.cluster)
    if priced is None:
        raise BadInput(unpredicted_message(run.cluster))
    recompute = float(RECOMPUTE_MODES.index(strategy.recompute))
    time = time_with_constants(run.model, priced.machine, priced.constants, layout.capacity, recompute)
    local = SampleLayout(layout.ranks, layout.capacity)
    one, two = (_step_seconds(*plan_of(run, local, strategy, count)) for count in (1, 2))
    full = float(time.shared(np.array([layout.capacity]))[0]) + time.fixed
    beside = max(two - one - full, 0.0)
    exchange = _exchange_seconds(priced) / layout.capacity if layout.ulysses > 1 else 0.0
    time = replace(time, fixed=time.fixed + beside)
    if layout.hybrid:
        exchanged = hybrid_exchange(run, layout.ranks, layout.heads)
        time = replace(time, exchange=exchanged, always_exchange=always_exchanges(run))
    return LayoutTimes(time, _ring_time(run, priced), max(one - full - beside, 0.0), exchange)


def _step_seconds(run: RunSpec, plan: Plan) -> float:
    predicted = reprice(run, plan).predicted
    assert predicted is not None and predicted.step_seconds is not None
    return predicted.step_seconds


def _exchange_seconds(priced: Pricing) -> float:
    """Return the seconds in which context ranks exchange tokens and heads for one micro-batch, in all layers."""
    return number(sum(context_traffic(priced.shape, priced.machine, priced.layout, priced.constants)))


def hybrid_exchange(run: RunSpec, ranks: int, heads: int) -> float:
    """Return the seconds per token for which ranks that divide a sample exchange tokens for heads (Ulysses).

    The result is infinite if none do.

    `heads` is the number of key/value heads on one of the `ranks`. A sample may be divided over any number of ranks
    that divides the heads. In a cluster of several nodes, the ranks of a sample are assumed to be on two nodes. If
    Ulysses is pinned and the rates of the device are unknown, the result is 0.
    """
    pinned = pins_of(run).hybrid_attention
    ulysses = max((number for number in range(2, ranks + 1) if heads % number == 0), default=1)
    if pinned == "ring" or ulysses == 1:
        return math.inf
    # The bytes per token do not depend on the number of other ranks.
    layout = SampleLayout(ulysses, EXCHANGED_TOKENS, ulysses=ulysses)
    changed, plan = plan_of(run, layout, LayerStrategy(reshard=False, gradients="whole"))
    priced = pricing(changed.model, changed.train, plan, run.cluster)
    if priced is None:
        return math.inf if pinned is None else 0.0
    exchange, _, _ = context_messages(priced.shape, priced.layout, step_shape(priced.shape, priced.layout))
    sent = number(exchange.bytes) * number(exchange.forward + exchange.backward) * REPEATED_EXCHANGES / EXCHANGED_TOKENS
    link = number(link_rate(priced.machine, priced.constants))
    port = number(port_rate(priced.machine, priced.constants))
    return sent / link if run.cluster.ranks <= run.cluster.ranks_per_node else sent / 2 / min(link, port)


def always_exchanges(run: RunSpec) -> bool:
    """Return whether ranks use Ulysses for every sample that is divided over a number of ranks which divides the heads."""
    return pins_of(run).hybrid_attention == "ulysses"


def ring_seconds(run: RunSpec, plan: Plan) -> float:
    """Return the seconds per token of the ring messages of a sample that all ranks of `plan` divide.

    The result is 0 if the device's rates are unknown.
    """
    priced = pricing(run.model, run.train, plan, run.cluster)
    return 0.0 if priced is None else float(_ring_time(run, priced).seconds(np.ones(1), plan.ranks)[0])


def _ring_time(run: RunSpec, priced: Pricing) -> RingTime:
    """Return the message sizes and rates of a ring between the run's ranks."""
    step = step_shape(priced.shape, priced.layout)
    _, passes, _ = context_messages(priced.shape, priced.layout, step)
    token_bytes = number(passes.bytes) / number(step.tokens) * number(priced.shape.attention_layers)
    machine = priced.machine
    k = priced.constants
    return RingTime(
        token_bytes,
        number(link_rate(machine, k)),
        number(port_rate(machine, k)),
        as_nodes(run.cluster).gpus_per_node,
        number(k.overlap_tax),
        backward=1 + GRADIENT_BYTES / 2,
    )
