"""Plans that fetch streamed optimizer state into free device memory before its update, for the search."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from meshwright.planner.candidate import Candidate, fits, pins_of
from meshwright.planner.reprice import reprice
from meshwright.spec.plan import RECOMPUTE_MODES, LayerStrategy, Plan, Recompute
from meshwright.spec.run import RunSpec
from meshwright.workload.dtypes import GB, staging_bytes
from meshwright.workload.plan_bytes import optimizer_on_host

STEP_GB = 0.1
"""Difference of two sizes that are tried, in gigabytes (10⁹ bytes)."""
LEAST_GAIN = 0.001
"""Relative difference of step times from which more staging counts as faster."""


def plans_with_staging(run: RunSpec, candidates: Sequence[Candidate], budget: int | None) -> Iterator[Plan]:
    """Yield by schedule the fastest simulated plan with the least staging that is about as fast as all that fits.

    `candidates` are sorted, fastest first; `budget` is a device's memory in bytes. Only where a pin keeps state in host memory: else free
    memory holds state that is never copied, which is better.
    """
    pins = pins_of(run)
    if budget is None or run.cluster.is_cpu or pins.offload_staging is not None or not pins.offload_fraction:
        return
    schedules = set[str]()
    for candidate in candidates:
        plan = candidate.plan
        offloads = any(layer.optimizer_offloaded for layer in plan.layers)
        if candidate.simulated and offloads and plan.schedule.name not in schedules:
            schedules.add(plan.schedule.name)
            for layers in with_more_recompute(run, plan):
                yield from _with_staging(run, replace(plan, layers=layers), budget)


def with_more_recompute(run: RunSpec, plan: Plan) -> list[tuple[LayerStrategy, ...]]:
    """The plan's layers as they are, and with each recompute mode that keeps fewer activations.

    Only as they are where a pin decides.
    """
    pins = pins_of(run)
    if pins.recompute is not None or pins.layers is not None:
        return [plan.layers]
    modes: tuple[Recompute, ...] = ("selective",) if plan.paired else ("selective", "full")
    changed = (tuple(_with_recompute(layer, mode) for layer in plan.layers) for mode in modes)
    return list(dict.fromkeys((plan.layers, *changed)))


def _with_recompute(layer: LayerStrategy, mode: Recompute) -> LayerStrategy:
    """The layers with `mode` if it keeps fewer activations than their own mode."""
    keeps_fewer = RECOMPUTE_MODES.index(mode) > RECOMPUTE_MODES.index(layer.recompute)
    return replace(layer, recompute=mode) if keeps_fewer else layer


def _with_staging(run: RunSpec, plan: Plan, budget: int) -> Iterator[Plan]:
    """The plan with the smallest size whose step time is within `LEAST_GAIN` of that at the largest size that fits.

    Yields nothing if that is the size of the buffers that exist in any case, or if no size fits. Both bisections are valid because with
    more staging a device needs more memory, and a step is never slower.
    """
    bytes_per_rank = optimizer_on_host(run.model, plan, 1) / plan.ranks
    first = ceil(staging_bytes(0.0, plan.precision) / GB / STEP_GB)
    last = int(bytes_per_rank / GB / STEP_GB) + 1
    sizes = [0.0, *(round(STEP_GB * count, 1) for count in range(first, last + 1))]

    def staged(size: float) -> Plan:
        return replace(plan, offload_staging=size)

    def seconds(size: float) -> float:
        return Candidate(reprice(run, staged(size), by_units=False)).seconds

    fitting = sizes[: bisect_left(sizes, True, key=lambda size: not fits(run, staged(size), budget))]
    if not fitting:
        return
    seconds_at_largest = seconds(fitting[-1])
    longest = seconds_at_largest * (1 + LEAST_GAIN)
    smallest = fitting[bisect_left(fitting, True, key=lambda size: seconds(size) <= longest)]
    if smallest:
        yield staged(smallest)
