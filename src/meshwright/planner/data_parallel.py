"""The planner's first floor: data-parallel plans that fit, best first, and what to make of a pinned pipeline.

Every combination of replicas × shards, micro-batch, resharding and recompute is estimated; those that fit are ordered by what costs
time, in this order: recompute (arithmetic done twice), resharding (weights gathered twice), shards across nodes where replicas would
do, and small micro-batches (gathers that less arithmetic hides). The cost model does not decide these.

Where a pipeline or layered accumulation is pinned it does, if it knows the chip (planner.clock): in which order micro-batches run, and
how many, cannot be told from memory alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import get_args

from meshwright.costs.memory import fullest
from meshwright.planner.candidate import HEADROOM, Candidate, peak_bytes, pins_of
from meshwright.planner.clock import estimated_seconds, simulated_seconds
from meshwright.planner.reasons import nothing_fits, reasons
from meshwright.planner.schedule_choice import pinned_refusal, schedules_for
from meshwright.simulator.of_plan import memory_of
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.plan import (
    BatchPlan,
    Gradients,
    LayerStrategy,
    MeshAxis,
    Plan,
    PlanPins,
    Precision,
    Predicted,
    Recompute,
    SchedulePlan,
)
from meshwright.spec.run import RunSpec

SIMULATED = 4
"""Candidates that are simulated unit by unit where the cost model decides; the others are estimated."""
PLENTY = 32
"""Micro-batches for each pipeline rank beyond which more do not shorten the idle start and end: only a lack of memory asks for them."""
RECOMPUTE_ORDER = {mode: cost for cost, mode in enumerate(get_args(Recompute))}


def choose(run: RunSpec, *, memory_bytes: int | None = None) -> tuple[Plan, tuple[Candidate, ...]]:
    """The best plan for `run` and every candidate, best first.

    `memory_bytes` is one device's memory when the chip table does not know it (the host's share on CPU).
    Raises BadInput when the pins cannot be met and OutOfResources when nothing fits.
    """
    budget = run.cluster.memory_bytes() or memory_bytes
    candidates = sorted(_candidates(run, budget), key=lambda c: c.key)
    if not candidates:
        raise BadInput(_no_candidate(run))
    if clocked(run):
        candidates = _timed(run, candidates)
    best = candidates[0]
    if not best.fits:
        raise OutOfResources(nothing_fits(candidates, budget or 0))
    return replace(best.plan, why=reasons(best, candidates, run, budget)), tuple(candidates)


def clocked(run: RunSpec) -> bool:
    """Whether the cost model decides: a pipeline or layered accumulation is pinned, on chips and in a format it knows."""
    pins = pins_of(run)
    format_known = (pins.compute or "bf16") == "bf16" and not run.cluster.is_cpu
    return staged(pins) and format_known and run.cluster.gpu in CHIPS and "bf16" in CHIPS[run.cluster.gpu].peak_flops


def staged(pins: PlanPins) -> bool:
    """Whether more than the order of whole micro-batches on one rank is at stake."""
    return (pins.pipeline or 1) > 1 or pins.schedule == "breadth_first"


def _timed(run: RunSpec, candidates: list[Candidate]) -> list[Candidate]:
    """Those that fit by estimated seconds, the first few of them simulated."""
    known = [replace(c, seconds=estimated_seconds(run, c.plan)) if c.fits else c for c in candidates]
    known.sort(key=lambda c: c.key)
    leading = [replace(c, seconds=simulated_seconds(run, c.plan), simulated=True) for c in known[:SIMULATED] if c.fits]
    return sorted([*leading, *known[len(leading) :]], key=lambda c: c.key)


def _candidates(run: RunSpec, budget: int | None) -> Iterator[Candidate]:
    pins = pins_of(run)
    for mesh in _meshes(run.cluster, pins):
        ranks = mesh[0] * mesh[1]
        if run.train.global_batch % ranks:
            continue
        per_rank = run.train.global_batch // ranks
        found = False
        for micro in _micro_batches(per_rank, pins):
            few = per_rank // micro <= PLENTY * (pins.pipeline or 1)
            if clocked(run) and found and not few:
                continue
            for candidate in _of_size(run, pins, mesh, micro, budget):
                found = found or candidate.fits
                yield candidate


def _of_size(
    run: RunSpec, pins: PlanPins, mesh: tuple[int, int], micro: int, budget: int | None
) -> Iterator[Candidate]:
    if staged(pins):
        yield from _staged(run, pins, mesh, micro, budget)
        return
    for schedule in schedules_for(run, run.train.global_batch // (mesh[0] * mesh[1] * micro)):
        for layers in _strategies(pins):
            yield _estimate(run, _plan(run, pins, mesh, micro, layers, schedule), budget)


def _staged(run: RunSpec, pins: PlanPins, mesh: tuple[int, int], micro: int, budget: int | None) -> Iterator[Candidate]:
    """Of each schedule, with gradients whole and sharded, the first in the order that fits, or the smallest when none does."""
    accumulate = run.train.global_batch // (mesh[0] * mesh[1] * micro)
    for schedule, gradients in product(schedules_for(run, accumulate), _gradients(run, mesh[1], accumulate)):
        if gradients == "whole" and schedule.name == "breadth_first" and pins.gradients is None:
            continue  # reduced once a step in any case
        tried = []
        for layers in _strategies(pins, gradients):
            tried.append(_estimate(run, _plan(run, pins, mesh, micro, layers, schedule), budget))
            if tried[-1].fits:
                break
        fitting = [candidate for candidate in tried if candidate.fits]
        yield fitting[0] if fitting else min(tried, key=lambda c: peak_bytes(c.plan))


def _gradients(run: RunSpec, shards: int, accumulate: int) -> list[Gradients]:
    pins = pins_of(run)
    given = pins.gradients is not None or pins.layers is not None
    if given or shards == 1 or accumulate == 1 or not clocked(run):
        return [pins.gradients or "shard"]
    return ["whole", "shard"]


def _meshes(cluster: ClusterSpec, pins: PlanPins) -> list[tuple[int, int]]:
    """(replicate, shard) pairs: everything sharded, or whole copies per node; other pairs only when pinned."""
    ranks = cluster.ranks // math.prod(_others(pins).values())
    nodes = cluster.nodes * cluster.emulate_nodes
    nodes = math.gcd(ranks, nodes // math.gcd(nodes, pins.pipeline or 1))  # those that one stage lies on
    pairs = {(1, ranks), (nodes, ranks // nodes)}
    if pins.replicate or pins.shard:
        pairs = {(ranks // shard, shard) for shard in range(1, ranks + 1) if ranks % shard == 0}
    wanted = (pins.replicate, pins.shard)
    return sorted(p for p in pairs if all(want in (None, have) for want, have in zip(wanted, p, strict=True)))


def _micro_batches(per_rank: int, pins: PlanPins) -> list[int]:
    """Sizes that divide a rank's sequences, largest first.

    In a pipeline only those in steps of two, and that give every rank a micro-batch, where there are such: with fewer it mostly idles.
    """
    sizes = [size for size in range(per_rank, 0, -1) if per_rank % size == 0]
    if pins.micro_batch is not None:
        return [size for size in sizes if size == pins.micro_batch]
    pipeline = pins.pipeline or 1
    if staged(pins):
        sizes = [size for size in sizes if per_rank // size >= pipeline] or sizes[-1:]
        sizes = [size for size in sizes if size & (size - 1) == 0] or sizes
    return sizes


def _strategies(pins: PlanPins, gradients: Gradients | None = None) -> list[tuple[LayerStrategy, ...]]:
    """Layer strategies by what they cost, cheapest first."""
    if pins.layers is not None:
        return [pins.layers]
    reshards = [False, True] if pins.reshard is None else [pins.reshard]
    recomputes = get_args(Recompute) if pins.recompute is None else [pins.recompute]
    kept = gradients or pins.gradients or "shard"
    return [
        (LayerStrategy(reshard=reshard, gradients=kept, recompute=mode),)
        for mode, reshard in product(recomputes, reshards)
    ]


def _others(pins: PlanPins) -> dict[str, int]:
    """Pinned axes that are not data axes, outermost first: the pipeline crosses the slowest links, tensor the fastest."""
    sizes = {
        "pipeline": pins.pipeline,
        "context_ring": pins.context_ring,
        "context_ulysses": pins.context_ulysses,
        "tensor": pins.tensor,
    }
    return {axis: size for axis, size in sizes.items() if size and size > 1}


def _plan(
    run: RunSpec,
    pins: PlanPins,
    mesh: tuple[int, int],
    micro: int,
    layers: tuple[LayerStrategy, ...],
    schedule: SchedulePlan,
) -> Plan:
    cluster, others = run.cluster, _others(pins)
    sizes = {"pipeline": others.pop("pipeline", 1), "replicate": mesh[0], "shard": mesh[1], **others}
    axes, inner = [], cluster.ranks
    for name, size in sizes.items():
        inner //= size  # ranks that one step along the axis passes over
        crosses = "node" if size > 1 and inner * size > cluster.ranks_per_node else "device"
        axes.append(MeshAxis(axis=name, size=size, crosses=crosses))  # type: ignore[arg-type]
    accumulate = run.train.global_batch // (mesh[0] * mesh[1] * micro)
    compute = pins.compute or ("fp32" if cluster.is_cpu else "bf16")
    return Plan(
        mesh=tuple(axis for axis in axes if axis.size > 1 or axis.axis == "shard"),
        batch=BatchPlan(global_batch=run.train.global_batch, micro_batch=micro, accumulate=accumulate),
        schedule=schedule,
        layers=layers,
        precision=Precision(
            compute=compute,
            reduce=pins.reduce or ("fp64" if compute == "fp64" else "fp32"),
            reduce_replicas=pins.reduce_replicas,
        ),
        compile=not cluster.is_cpu if pins.compile is None else pins.compile,
    )


def _estimate(run: RunSpec, plan: Plan, budget: int | None) -> Candidate:
    kinds = fullest(memory_of(run.model, run.train, plan, cpu=run.cluster.is_cpu))
    peak = sum(kinds.values())
    plan = replace(plan, predicted=Predicted(memory_peak_bytes=peak, memory_bytes=kinds))
    shard_axis = next(axis for axis in plan.mesh if axis.axis == "shard")
    order = (
        max(RECOMPUTE_ORDER[layer.recompute] for layer in plan.layers),
        any(layer.reshard for layer in plan.layers),
        shard_axis.crosses == "node",
        -plan.batch.micro_batch,
    )
    return Candidate(plan, budget is None or peak <= HEADROOM * budget, order)


def _no_candidate(run: RunSpec) -> str:
    pins = pins_of(run)
    for replicas, shards in _meshes(run.cluster, pins):
        accumulate, left = divmod(run.train.global_batch, replicas * shards * (pins.micro_batch or 1))
        if not left and (refused := pinned_refusal(run, accumulate)):
            return f"no plan: {refused}; they are train.global_batch ÷ data ranks ÷ micro-batch size"
    return (
        f"no plan: train.global_batch {run.train.global_batch} must be a multiple of the data ranks (the cluster's {run.cluster.ranks} "
        "ranks ÷ pinned pipeline, tensor and context; times plan.micro_batch if pinned), and plan.replicate × plan.shard that number"
    )
