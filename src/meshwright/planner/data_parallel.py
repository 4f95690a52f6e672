"""The planner's first floor: data-parallel plans that fit, best first.

Every combination of replicas × shards, micro-batch, resharding and recompute is estimated; those that fit are ordered by what costs
time, in this order: recompute (arithmetic done twice), resharding (weights gathered twice), shards across nodes where replicas would
do, and small micro-batches (gathers that less arithmetic hides). The cost model does not decide yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

from meshwright.costs.memory import memory_by_kind
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.layout import stage_table
from meshwright.spec.plan import (
    BatchPlan,
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

HEADROOM = 0.92
"""Share of a device's memory a plan may fill; the rest is left to fragmentation."""
ORDER = (
    "computes activations twice",
    "gathers weights twice",
    "shards across nodes",
    "smaller products to hide gathers under",
)
"""What each place of a candidate's order stands for."""
RECOMPUTE_ORDER = {mode: cost for cost, mode in enumerate(get_args(Recompute))}


@dataclass(frozen=True)
class Candidate:
    """One plan, whether it fits, and its place in the order (lower is better)."""

    plan: Plan
    fits: bool
    order: tuple[float, ...]

    def reason_over(self, other: Candidate) -> str:
        """Why this one was preferred to `other`: the first thing in the order in which they differ."""
        if self.fits and not other.fits:
            return "does not fit"
        mine = (
            now
            for now, then in zip(ORDER, zip(self.order, other.order, strict=True), strict=True)
            if then[0] != then[1]
        )
        return next(mine, "equal")


def choose(run: RunSpec, *, memory_bytes: int | None = None) -> tuple[Plan, tuple[Candidate, ...]]:
    """The best plan for `run` and every candidate, best first.

    `memory_bytes` is one device's memory when the chip table does not know it (the host's share on CPU).
    Raises BadInput when the pins cannot be met and OutOfResources when nothing fits.
    """
    budget = run.cluster.memory_bytes() or memory_bytes
    candidates = sorted(_candidates(run, budget), key=lambda c: (not c.fits, c.order))
    if not candidates:
        raise BadInput(_no_candidate(run))
    best = candidates[0]
    if not best.fits:
        raise OutOfResources(_nothing_fits(candidates, budget or 0))
    return replace(best.plan, why=_reasons(best.plan, run, budget)), tuple(candidates)


def _candidates(run: RunSpec, budget: int | None) -> Iterator[Candidate]:
    pins = run.plan if isinstance(run.plan, PlanPins) else PlanPins()
    for mesh in _meshes(run.cluster, pins):
        ranks = mesh[0] * mesh[1]
        if run.train.global_batch % ranks:
            continue
        for micro, layers in product(_micro_batches(run.train.global_batch // ranks, pins), _strategies(pins)):
            yield _estimate(run, _plan(run, pins, mesh, micro, layers), budget)


def _meshes(cluster: ClusterSpec, pins: PlanPins) -> list[tuple[int, int]]:
    """(replicate, shard) pairs: everything sharded, or whole copies per node; other pairs only when pinned."""
    ranks = cluster.ranks // math.prod(_others(pins).values())
    nodes = math.gcd(ranks, cluster.nodes)
    pairs = {(1, ranks), (nodes, ranks // nodes)}
    if pins.replicate or pins.shard:
        pairs = {(ranks // shard, shard) for shard in range(1, ranks + 1) if ranks % shard == 0}
    wanted = (pins.replicate, pins.shard)
    return sorted(p for p in pairs if all(want in (None, have) for want, have in zip(wanted, p, strict=True)))


def _micro_batches(per_rank: int, pins: PlanPins) -> list[int]:
    sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    return [size for size in sizes if pins.micro_batch in (None, size)]


def _strategies(pins: PlanPins) -> list[tuple[LayerStrategy, ...]]:
    if pins.layers is not None:
        return [pins.layers]
    reshards = [False, True] if pins.reshard is None else [pins.reshard]
    recomputes = get_args(Recompute) if pins.recompute is None else [pins.recompute]
    gradients = pins.gradients or "shard"
    return [
        (LayerStrategy(reshard=reshard, gradients=gradients, recompute=mode),)
        for reshard, mode in product(reshards, recomputes)
    ]


def _others(pins: PlanPins) -> dict[str, int]:
    """Pinned axes that are not data axes, outermost first: the pipeline crosses the slowest links, tensor the fastest."""
    sizes = {axis: getattr(pins, axis) or 1 for axis in ("pipeline", "context_ring", "context_ulysses", "tensor")}
    return {axis: size for axis, size in sizes.items() if size > 1}


def _plan(run: RunSpec, pins: PlanPins, mesh: tuple[int, int], micro: int, layers: tuple[LayerStrategy, ...]) -> Plan:
    cluster, others = run.cluster, _others(pins)
    sizes = {"pipeline": others.pop("pipeline", 1), "replicate": mesh[0], "shard": mesh[1], **others}
    axes, inner = [], cluster.ranks
    for name, size in sizes.items():
        inner //= size  # ranks that one step along the axis passes over
        crosses = "node" if size > 1 and inner * size > cluster.gpus_per_node else "device"
        axes.append(MeshAxis(axis=name, size=size, crosses=crosses))  # type: ignore[arg-type]
    accumulate = run.train.global_batch // (mesh[0] * mesh[1] * micro)
    compute = pins.compute or ("fp32" if cluster.is_cpu else "bf16")
    return Plan(
        mesh=tuple(axis for axis in axes if axis.size > 1 or axis.axis == "shard"),
        batch=BatchPlan(global_batch=run.train.global_batch, micro_batch=micro, accumulate=accumulate),
        schedule=_schedule(pins, run.model.layers),
        layers=layers,
        precision=Precision(
            compute=compute,
            reduce=pins.reduce or ("fp64" if compute == "fp64" else "fp32"),
            reduce_replicas=pins.reduce_replicas,
        ),
        compile=not cluster.is_cpu if pins.compile is None else pins.compile,
    )


def _schedule(pins: PlanPins, layers: int) -> SchedulePlan:
    """The pinned schedule with its stages written out, or 1F1B."""
    schedule = SchedulePlan(name=pins.schedule or "1f1b", stages=pins.stages or ())
    table = stage_table(schedule, pins.pipeline or 1, layers)
    if len(table) == len(table[0]) == 1:
        return schedule
    texts = tuple(tuple(f"{held.start}-{held.stop - 1}" for held in row) for row in table)
    return replace(schedule, stages=texts)


def _estimate(run: RunSpec, plan: Plan, budget: int | None) -> Candidate:
    kinds = memory_by_kind(run.model, run.train, plan, cpu=run.cluster.is_cpu)
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


def _reasons(plan: Plan, run: RunSpec, budget: int | None) -> tuple[str, ...]:
    pins = run.plan if isinstance(run.plan, PlanPins) else PlanPins()
    layer = plan.layers[0]
    peak = plan.predicted.memory_peak_bytes if plan.predicted else 0
    room = f" of {budget / 1e9:.1f} GB" if budget else ""
    reasons = [f"predicted peak {peak / 1e9:.1f} GB a rank{room}"]
    if layer.recompute != "none" and pins.recompute is None and pins.layers is None:
        reasons.append(f"recompute {layer.recompute}: less does not fit")
    if layer.reshard and plan.axis_size("shard") > 1 and pins.reshard is None and pins.layers is None:
        reasons.append("reshard: keeping gathered weights does not fit")
    if plan.axis_size("replicate") > 1 and pins.replicate is None and pins.shard is None:
        reasons.append(f"replicate {plan.axis_size('replicate')}: only gradient sums cross the replicas")
    pinned = [key for key, value in vars(pins).items() if value is not None]
    return (*reasons, "pinned by the run file: " + ", ".join(pinned)) if pinned else tuple(reasons)


def _no_candidate(run: RunSpec) -> str:
    return (
        f"no plan: train.global_batch {run.train.global_batch} must be a multiple of the data ranks (the cluster's {run.cluster.ranks} ranks "
        "÷ pinned pipeline, tensor and context; times plan.micro_batch if pinned), and plan.replicate × plan.shard that number"
    )


def _nothing_fits(candidates: list[Candidate], budget: int) -> str:
    smallest = min(candidates, key=lambda c: c.plan.predicted.memory_peak_bytes if c.plan.predicted else 0)
    assert smallest.plan.predicted is not None
    kinds = sorted(smallest.plan.predicted.memory_bytes.items(), key=lambda item: -item[1])
    top = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in kinds[:3])
    return (
        f"no plan fits: the smallest needs {smallest.plan.predicted.memory_peak_bytes / 1e9:.1f} GB a rank and "
        f"{HEADROOM * budget / 1e9:.1f} GB ({HEADROOM:.0%} of {budget / 1e9:.1f}) may be used; most of it: {top} (GB). "
        "More ranks, a shorter train.seq_len or a smaller train.loss_chunk lower it"
    )
