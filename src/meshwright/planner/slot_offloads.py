"""Slots (micro-batches) with offload of activations for long samples: how large they are, how many layers offload, and for which samples.

The method is ByteScale's selective offload (Ge et al. 2025, arXiv 2502.21231). The work of attention grows with the square of a sample's
length, but activations grow only with its length. So a long sample computes long enough to hide its copies to host memory, and with offload
it needs fewer ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf

from meshwright.costs.offload_costs import activation_copies, host_rate
from meshwright.costs.plan_costs import Pricing, number, pricing
from meshwright.planner.candidate import compiles, fits, in_longer_slots, pins_of, slot_run
from meshwright.planner.sample_plans import plan_of
from meshwright.policies.sample_time import SampleTime, shortest_hiding
from meshwright.simulator.sample_layouts import SampleLayout
from meshwright.simulator.sample_times import time_with_constants
from meshwright.simulator.step_simulation import memory_of
from meshwright.spec.plan import PARTIAL_RECOMPUTES, RECOMPUTE_MODES, LayerStrategy, Plan, SlotOffload
from meshwright.spec.run import RunSpec
from meshwright.workload.buffers import DEVICE_LAYERS
from meshwright.workload.plan_bytes import fullest

FRACTIONS = (3 / 4, 1 / 2, 1 / 4)
"""Sizes of slots without offload that are tried, relative to the size of slots with offload."""
SEVERAL = 2
"""Micro-batches of the plans whose memory is computed. Two are enough to include the sums of gradients over micro-batches."""


def offloaded_layers(capacity: int, longer: int, layers: int) -> int | None:
    """Return how many of `layers` blocks must offload so that `longer` tokens need no more memory than `capacity` tokens without offload.

    None if not even all blocks are enough.

    For twice as many tokens, half of 32 blocks must offload, and 2 more because the device stores two of the offloading blocks:

    >>> offloaded_layers(capacity=4096, longer=8192, layers=32)
    18
    """
    needed = ceil(layers * (1 - capacity / longer) + DEVICE_LAYERS - 1e-9)
    return needed if needed <= layers else None


def slot_offload(
    priced: Pricing | None, time: SampleTime, capacity: int, longer: int, ranks: int, layers: int
) -> tuple[SlotOffload, bool] | None:
    """Return slots of `longer` tokens with offload, next to slots of `capacity` tokens without, and whether all copies are hidden.

    None if the memory is not enough. `time` gives the seconds of a sample on a device; `layers` is the number of the model's layers.
    Samples use these slots from a length on at which their compute hides the copies. Samples that `ranks` ranks cannot hold without
    offload use them in any case. If the rates of the device are not known (`priced` is None), all samples above `capacity` use them.
    """
    offloaded = offloaded_layers(capacity, longer, layers)
    if offloaded is None:
        return None
    hiding = 1.0
    least = ranks * capacity + 1
    if priced is not None:
        hiding = shortest_hiding(time, _copy_seconds(priced, offloaded / layers))
    shortest = ceil(min(max(hiding, capacity + 1), least))
    return SlotOffload(capacity=longer, layers=offloaded, shortest=shortest), hiding <= least


def _copy_seconds(priced: Pricing, share: float) -> float:
    """Return the seconds to copy the activations of one token in one direction, if the share `share` of the layers offloads."""
    if number(host_rate(priced.machine)) <= 0:
        return inf
    layout = replace(priced.layout, offload_activations=share)
    # Tensor ranks divide the activations, as they divide the time of samples, so this is for one device too.
    tokens = number(layout.micro_batch) * number(layout.seq) / number(layout.context) / number(layout.tensor)
    return number(activation_copies(priced.shape, priced.machine, layout)) / tokens


def with_slot_offload(run: RunSpec, plan: Plan) -> Plan:
    """Return `plan` with the slots with offload that the run pins; unchanged if it pins none.

    If these slots need more memory than the others, the plan's predicted memory becomes theirs.
    """
    longer = pins_of(run).offload_capacity
    samples = plan.samples
    if longer is None or samples is None:
        return plan
    priced = pricing(run.model, slot_run(run, plan).train, plan, run.cluster)
    time = SampleTime(samples.alpha, samples.beta)
    found = slot_offload(priced, time, samples.capacity, longer, plan.data_ranks, run.model.layers)
    assert found is not None, "config.sample_rules refuses slots that do not fit"
    if plan.predicted is not None:
        categories = longer_slot_memory(slot_run(run, plan), plan, found[0])
        if sum(categories.values()) > plan.predicted.memory_peak_bytes:
            predicted = replace(plan.predicted, memory_bytes=categories, memory_peak_bytes=sum(categories.values()))
            plan = replace(plan, predicted=predicted)
    return replace(plan, samples=replace(samples, offload=found[0]))


def longer_slot_memory(run: RunSpec, plan: Plan, offload: SlotOffload) -> dict[str, int]:
    """Return the bytes of each memory category of a rank in a slot with offload. `plan` describes the slots without offload."""
    run, plan = in_longer_slots(run, plan, offload)
    return fullest(memory_of(run.model, run.train, plan, cpu=run.cluster.is_cpu))


def offload_layouts(
    run: RunSpec, layout: SampleLayout, strategy: LayerStrategy | None, budget: int | None
) -> Iterator[tuple[SampleLayout, LayerStrategy, int]]:
    """Hybrid layouts whose long samples have slots of the size of `layout`, with offload and less recompute; their memory.

    `strategy` has the least recompute with which `layout` fits without offload, None if it does not. The other slots have the most tokens
    of `FRACTIONS` that fit.
    """
    pins = pins_of(run)
    if pins.offload is not None or pins.layers is not None or run.model.experts:
        return
    # Only modes that recompute less than `strategy`.
    mode_count = len(RECOMPUTE_MODES) if strategy is None else RECOMPUTE_MODES.index(strategy.recompute)
    modes = [mode for mode in RECOMPUTE_MODES[:mode_count] if pins.recompute in (None, mode)]
    for recompute in modes:
        if recompute in PARTIAL_RECOMPUTES and not compiles(run):
            continue
        gather_once_strategy = LayerStrategy(reshard=False, gradients="whole", recompute=recompute)
        for fraction in FRACTIONS:
            found = _offload_layout(run, layout, gather_once_strategy, 2 * ceil(fraction * layout.capacity / 2), budget)
            if found is not None:
                yield found
                break


def _offload_layout(
    run: RunSpec, layout: SampleLayout, strategy: LayerStrategy, capacity: int, budget: int | None
) -> tuple[SampleLayout, LayerStrategy, int] | None:
    """The layout with slots of `capacity` tokens without offload, if both kinds of slots fit and all copies are hidden."""
    if offloaded_layers(capacity, layout.capacity, run.model.layers) is None:
        return None
    shorter = replace(layout, capacity=capacity)
    changed, plan = plan_of(run, shorter, strategy, SEVERAL)
    if not fits(changed, plan, budget):
        return None
    priced = pricing(changed.model, changed.train, plan, run.cluster)
    if priced is None:
        return None
    recompute = float(RECOMPUTE_MODES.index(strategy.recompute))
    time = time_with_constants(run.model, priced.machine, priced.constants, capacity, recompute)
    found = slot_offload(priced, time, capacity, layout.capacity, layout.ranks, run.model.layers)
    if found is None or not found[1] or not fits(*in_longer_slots(changed, plan, found[0]), budget):
        return None
    categories = max(
        fullest(memory_of(changed.model, changed.train, plan, cpu=run.cluster.is_cpu)),
        longer_slot_memory(changed, plan, found[0]),
        key=lambda rank: sum(rank.values()),
    )
    return replace(shorter, offload=found[0]), strategy, sum(categories.values())
