"""Options of a plan that move training state to the device, or out of it: offloaded state, staging, gradient sums,
tiles.

Each function that yields plans has the arguments of a `Move`: the run, the plan to change, and the usable memory of a
device in bytes or None.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import ceil

from meshwright.planner.candidate import (
    Candidate,
    fits,
    linear_dtypes,
    overfull_ranks,
    pins_of,
    precision_of,
)
from meshwright.planner.explain import shortfall
from meshwright.planner.finalists import with_least_offloaded
from meshwright.planner.reprice import reprice
from meshwright.spec.model import trained_parameter_count
from meshwright.spec.plan import RECOMPUTE_MODES, RECOMPUTES_MATMULS, SPLITS_BACKWARD, LayerStrategy, Plan, Recompute
from meshwright.spec.run import RunSpec
from meshwright.workload.dtypes import GB, bytes_of, staging_bytes
from meshwright.workload.groups import gathers_weights
from meshwright.workload.plan_bytes import optimizer_on_host

STEP_GB = 0.1
"""Difference of two sizes of staging that are tried, in gigabytes (10⁹ bytes)."""
LEAST_GAIN = 0.001
"""More staging counts as faster only if the step time falls by more than this share."""
LEAST_SUMS = 0.05
"""Layouts are also searched with gradient sums in host memory if the sums, divided over all ranks, take at least this
share of a device.
"""
TILE = 8192
"""Tokens of a tile. They are enough for matmuls at full rate, and have a gigabyte of activations for Llama-3-8B."""
Fits = Callable[[Plan], bool]
"""Returns whether a plan fits into memory."""


def state_on_device(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """Yield the plan with the least offloaded optimizer state with which it fits, in thousandths of the whole state.

    It is also tried with more recomputation, with offloaded activations, and with weights that are freed after each
    use. These save device memory for state, and state on the device is not copied, which may save more time than they
    cost.
    """
    if budget is None or run.cluster.is_cpu or not _offloads_optimizer(plan):
        return

    saving = plan.layers, *_with_all_activations_offloaded(run, plan), *_with_all_freed(run, plan)
    recomputed = (layers for saved in saving for layers in with_more_recompute(run, replace(plan, layers=saved)))
    for layers in dict.fromkeys(recomputed):
        yield with_least_offloaded(run, replace(plan, layers=layers, offload_fraction=1.0), budget)


def fraction_reason(run: RunSpec, plan: Plan, fits: Fits) -> str:
    """Return why a part of the optimizer's state is on the devices; empty if no part is."""
    share = f"offload_fraction {plan.offload_fraction:g}: {1 - plan.offload_fraction:.0%} of the optimizer's state"
    return f"{share} fits on the devices and is not copied" if plan.offload_fraction < 1 else ""


def staging(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """Yield the plan with the least staging that is about as fast as the largest staging that fits; also with more
    recomputation.

    Only if a pin keeps state in host memory. Otherwise, free device memory is better used for state that is then never
    copied.
    """
    if budget is not None and pins_of(run).offload_fraction and not run.cluster.is_cpu and _offloads_optimizer(plan):
        for layers in with_more_recompute(run, plan):
            yield from _with_staging(run, replace(plan, layers=layers), budget)


def staging_reason(run: RunSpec, plan: Plan, fits: Fits) -> str:
    """Return why the plan has staging; empty if it has none."""
    gigabytes = (
        f"offload_staging {plan.offload_staging:g}: so many gigabytes of the optimizer's state are fetched before"
    )
    more = "beside the step; more would not make it faster, or does not fit"
    return f"{gigabytes} the update, {more}" if plan.offload_staging else ""


def sums_on_host(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """Yield the plan with gradient sums in host memory: the plan as it is if it does not fit, otherwise with less
    recomputation.

    Only on devices that have their own memory, and for a plan that sums gradient shards.
    """
    pins = pins_of(run)
    last = plan.layers[-1]
    if run.cluster.is_cpu or plan.accumulation == "host" or not any(map(plan.sums_shards, plan.layers)):
        return
    if any(overfull_ranks(run, plan, budget)):
        yield replace(plan, accumulation="host")
    elif pins.recompute is None and pins.layers is None:
        for mode in RECOMPUTE_MODES[: RECOMPUTE_MODES.index(last.recompute)]:
            yield replace(plan, accumulation="host", layers=(replace(last, range="all", recompute=mode),))


def with_sums_on_host(run: RunSpec) -> RunSpec | None:
    """Return `run` with gradient sums in host memory pinned; None if its pins exclude that, or if the sums take little
    of a device's memory.
    """
    pins = pins_of(run)
    memory = run.cluster.memory_bytes()
    if run.cluster.is_cpu or memory is None or pins.gradients == "whole":
        return None
    bytes_per_rank = trained_parameter_count(run.model) * bytes_of(precision_of(run).stored) / run.cluster.ranks
    if bytes_per_rank < LEAST_SUMS * memory:
        return None
    return replace(run, plan=replace(pins, accumulation="host", gradients="shard"))


def sums_reason(run: RunSpec, plan: Plan, fits: Fits) -> str:
    """Return why gradient sums are in host memory; empty if they are not."""
    if plan.accumulation != "host":
        return ""
    on_device = replace(plan, accumulation="device")
    need = "a step is no faster" if fits(on_device) else shortfall(run, on_device)
    return f"sums of gradients in host memory between micro-batches: on the devices {need}"


def with_tiles(run: RunSpec) -> RunSpec | None:
    """Return `run` with tiles of feed-forward networks pinned; None if its pins exclude that, or if a sequence has less
    than two tiles.
    """
    pins = pins_of(run)
    model = run.model
    dense = any(not model.routed(layer) for layer in range(model.layers))
    allowed = (
        model.adapter is None
        and (pins.tensor or 1) == 1
        and (pins.recompute is None or pins.recompute in RECOMPUTES_MATMULS)
        and pins.schedule not in SPLITS_BACKWARD
        and set(linear_dtypes(run)) == {"compute"}
    )
    if not (dense and allowed and run.train.seq_len >= 2 * TILE):
        return None
    return replace(run, plan=replace(pins, mlp_tile=TILE))


def tile_reason(run: RunSpec, plan: Plan, fits: Fits) -> str:
    """Return why feed-forward networks are computed in tiles; empty if they are not."""
    if not plan.mlp_tile:
        return ""
    whole = replace(plan, mlp_tile=0)
    need = "a step is no faster" if fits(whole) else shortfall(run, whole)
    return f"feed-forward networks in tiles of {plan.mlp_tile:,} tokens: without them {need}"


def with_more_recompute(run: RunSpec, plan: Plan) -> list[tuple[LayerStrategy, ...]]:
    """Return the plan's layers as they are, and with each recompute mode that saves fewer activations.

    If a pin decides recompute, only the layers as they are.
    """
    pins = pins_of(run)
    if pins.recompute is not None or pins.layers is not None:
        return [plan.layers]
    modes: tuple[Recompute, ...] = ("selective",) if plan.paired else ("selective", "full")
    changed = (tuple(_with_recompute(layer, mode) for layer in plan.layers) for mode in modes)
    return list(dict.fromkeys((plan.layers, *changed)))


def _with_recompute(layer: LayerStrategy, mode: Recompute) -> LayerStrategy:
    """Return the layers with `mode` if it saves fewer activations than their own mode."""
    keeps_fewer = RECOMPUTE_MODES.index(mode) > RECOMPUTE_MODES.index(layer.recompute)
    return replace(layer, recompute=mode) if keeps_fewer else layer


def _with_all_activations_offloaded(run: RunSpec, plan: Plan) -> Iterator[tuple[LayerStrategy, ...]]:
    """Yield layers in which all that offload their optimizer also offload their activations.

    Only for a plan in which some of them do so already.

    """
    pins = pins_of(run)
    if pins.offload is not None or pins.layers is not None or not any(layer.offload == "both" for layer in plan.layers):
        return
    if any(layer.offload == "optimizer" for layer in plan.layers):
        yield _joined(replace(layer, offload="both") if layer.optimizer_offloaded else layer for layer in plan.layers)


def _with_all_freed(run: RunSpec, plan: Plan) -> Iterator[tuple[LayerStrategy, ...]]:
    """Yield the layers of a plan that keeps gathered weights, with all weights freed after each use."""
    pins = pins_of(run)
    keeps = gathers_weights(plan) and not all(layer.reshard for layer in plan.layers)
    if pins.reshard is None and pins.layers is None and keeps:
        yield _joined(replace(layer, reshard=True) for layer in plan.layers)


def _joined(layers: Iterable[LayerStrategy]) -> tuple[LayerStrategy, ...]:
    """Return the layers, as one range if all have the same strategy.

    Two ranges with the same strategy become one:

    >>> len(_joined([LayerStrategy(range="0-15"), LayerStrategy(range="16-31")]))
    1
    """
    ranges = tuple(layers)
    alike = {replace(layer, range="all") for layer in ranges}
    return tuple(alike) if len(alike) == 1 else ranges


def _offloads_optimizer(plan: Plan) -> bool:
    return any(layer.optimizer_offloaded for layer in plan.layers)


def _with_staging(run: RunSpec, plan: Plan, budget: int) -> Iterator[Plan]:
    """Yield the plan with the least staging whose step time is within `LEAST_GAIN` of the step time with the largest
    staging that fits.

    Nothing is yielded if that is the size of the buffers that exist in any case, or if no size fits. With more staging,
    a device needs more memory and a step is never slower. So both sizes can be found by bisection.
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
