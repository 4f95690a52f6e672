"""Plans and times of layouts for samples of unequal lengths."""

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
"""Bytes per element of the gradients of keys and values on the ring."""
REPEATED_EXCHANGES = 1.5
"""Bytes that hybrid ranks exchange, relative to static Ulysses ranks: the backward repeats the forward's."""
EXCHANGED_TOKENS = 4096
"""Tokens of a part for which this exchange is priced."""


def plan_of(
    run: RunSpec, layout: SampleLayout, strategy: LayerStrategy, micro_batches: int = 1
) -> tuple[RunSpec, Plan]:
    """A plan of full micro-batches, and the run with its batch.

    Hybrid ranks have one sample of as many tokens as a micro-batch holds each.
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
    """Times of the layout's micro-batches with this strategy of all layers; raises BadInput without rates of the device.

    What a step takes beside the samples is the simulated time of plans with one and two micro-batches, less their samples.
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
    """Seconds in which a micro-batch's heads are exchanged for tokens, in all layers."""
    return number(sum(context_traffic(priced.shape, priced.machine, priced.layout, priced.constants)))


def hybrid_exchange(run: RunSpec, ranks: int, heads: int) -> float:
    """Seconds per token of a part in which ranks of a divided sample exchange tokens for heads; infinite where none do.

    `heads` are the key/value heads of one of the `ranks`; samples may be divided by any number of these that divides the heads. In a
    cluster of several nodes the ranks of a sample are taken to lie on two. With pinned Ulysses, 0 without rates of the device.
    """
    pinned = pins_of(run).hybrid_attention
    ulysses = max((number for number in range(2, ranks + 1) if heads % number == 0), default=1)
    if pinned == "ring" or ulysses == 1:
        return math.inf
    layout = SampleLayout(ulysses, EXCHANGED_TOKENS, ulysses=ulysses)  # its bytes per token depend on no other rank
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
    """Whether the run's ranks exchange tokens for heads wherever their number divides the heads."""
    return pins_of(run).hybrid_attention == "ulysses"


def ring_seconds(run: RunSpec, plan: Plan) -> float:
    """Seconds per token of the messages of a sample that all ranks of `plan` divide; 0 without rates of the device."""
    priced = pricing(run.model, run.train, plan, run.cluster)
    return 0.0 if priced is None else float(_ring_time(run, priced).seconds(np.ones(1), plan.ranks)[0])


def _ring_time(run: RunSpec, priced: Pricing) -> RingTime:
    """Messages of a ring between the run's ranks."""
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
