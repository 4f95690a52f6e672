"""Plans that fetch streamed optimizer state into free device memory before its update, for the search."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.planner.candidate import Candidate, fits, pins_of
from meshwright.planner.reprice import reprice
from meshwright.spec.plan import LayerStrategy, Plan, Recompute
from meshwright.spec.run import RunSpec
from meshwright.workload.plan_bytes import optimizer_on_host

STEP_GB = 0.1
"""Difference of two sizes that are tried, in gigabytes."""
LEAST_GAIN = 0.001
"""Relative difference of step times from which more staging counts as faster."""


def plans_with_staging(run: RunSpec, candidates: Sequence[Candidate], budget: int | None) -> Iterator[Plan]:
    """The fastest simulated plan of each schedule with as much staging as makes it faster and fits.

    Only where a pin keeps state in host memory: else free memory holds state that is never copied, which is better.
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
    """The plan's layer strategies and, where no pin decides, those with more recomputation, which frees memory."""
    pins, uniform = pins_of(run), replace(plan.layers[-1], range="all")
    if pins.recompute is not None or pins.layers is not None:
        return [plan.layers]
    modes: tuple[Recompute, ...] = ("selective",) if plan.paired else ("selective", "full")
    return list(dict.fromkeys((plan.layers, *((replace(uniform, recompute=mode),) for mode in modes))))


def _with_staging(run: RunSpec, plan: Plan, budget: int) -> Iterator[Plan]:
    streamed = optimizer_on_host(run.model, plan, 1) / plan.ranks
    sizes = [round(STEP_GB * count, 1) for count in range(int(streamed / 1e9 / STEP_GB) + 2)]

    def staged(size: float) -> Plan:
        return replace(plan, offload_staging=size)

    def seconds(size: float) -> float:
        return Candidate(reprice(run, staged(size), by_units=False)).seconds

    fitting = sizes[: bisect_left(sizes, True, key=lambda size: not fits(run, staged(size), budget))]
    if not fitting:
        return
    fastest = seconds(fitting[-1])
    first = bisect_left(fitting, True, key=lambda size: seconds(size) <= fastest * (1 + LEAST_GAIN))
    if fitting[first]:
        yield staged(fitting[first])
