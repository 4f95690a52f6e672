"""What a change to the cluster or the job would buy: the chosen plan priced again, with the fields around it that the change may move.

A search for every change would cost as much as the question did. So a change keeps the mesh and tries what is cheap to try (micro-batch,
gradients, recomputation, resharding); only one more node, which no mesh of before fits, is searched where searches are quick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.costs.machine_rates import machine_of
from meshwright.costs.plan_costs import as_nodes, number, plan_time
from meshwright.planner.candidate import budget_of, fits, pins_of, untrainable
from meshwright.planner.finalists import plan_at
from meshwright.planner.reprice import repriced
from meshwright.planner.search import search
from meshwright.planner.space import AXES, points
from meshwright.planner.sweep import strategies_in
from meshwright.simulator.step_simulation import priced_or_refused
from meshwright.spec.chips import CHIPS, GiB
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.fp8_limits import fp8_conflict, supports_fp8
from meshwright.spec.network import NetworkSpec
from meshwright.spec.plan import BatchPlan, Plan
from meshwright.spec.plan_name import mesh_name
from meshwright.spec.run import RunSpec
from meshwright.workload.groups import context_size

QUICK = 0.5
"""Seconds a search may have taken for a change to be searched too."""
PLAYED = 2
"""Plans of a change that are simulated; the closed form ranks the others."""
ROOMS = (1.05, 0.97)
"""Of the memory that may be filled, what the closed form is asked for, which strays a little from the exact account."""
SIZES = 8
"""Cluster sizes above the asked one that are tried for a legal one."""


@dataclass(frozen=True)
class Change:
    """What one change would buy."""

    name: str
    seconds: float
    tokens_per_second: float
    gain: float
    """Tokens per second against the plan as it is: 0.1 is a tenth more."""
    note: str
    """What of the plan moves with the change, or of the change itself; empty when nothing does."""


def what_if(
    run: RunSpec, plan: Plan, *, search_seconds: float = math.inf, trainable: bool = True
) -> tuple[Change, ...]:
    """Changes by what they bring, most first; empty where no step time is known."""
    if plan.predicted is None or plan.predicted.step_seconds is None:
        return ()
    run = replace(run, cluster=as_nodes(run.cluster))
    best = min((near for near in (repriced(run, plan), _fastest(run, plan)) if near), key=_seconds)
    # What other settings bring without it is no change's merit.
    plan = replace(plan, predicted=best.predicted)
    found = [change for make in CHANGES if (change := make(run, plan))]
    if grown := _another_node(run, plan, search_seconds <= QUICK, trainable):
        found.append(grown)
    return tuple(sorted(found, key=lambda change: -change.gain))


def _twice_the_network(run: RunSpec, plan: Plan) -> Change | None:
    if run.cluster.nodes == 1:
        return None
    rate = 2 * number(machine_of(run.cluster, plan.precision.compute).nic) / 1e9
    return _changed(
        f"twice the network ({rate:.4g} GB/s a GPU)",
        run,
        _with_network(run, replace(_network(run), port_gb_per_s=rate)),
        plan,
    )


def _twice_the_links(run: RunSpec, plan: Plan) -> Change | None:
    if run.cluster.gpus_per_node == 1:
        return None
    rate = 2 * number(machine_of(run.cluster, plan.precision.compute).link) / 1e9
    return _changed(
        f"twice the links in a node ({rate:.4g} GB/s a GPU)",
        run,
        _with_network(run, replace(_network(run), link_gb_per_s=rate)),
        plan,
    )


def _twice_the_batch(run: RunSpec, plan: Plan) -> Change | None:
    batch = 2 * run.train.global_batch
    larger = replace(run, train=replace(run.train, global_batch=batch))
    doubled = replace(plan.batch, global_batch=batch, accumulate=2 * plan.batch.accumulate)
    return _changed(f"twice the batch ({batch} sequences)", run, larger, plan, replace(plan, batch=doubled))


def _twice_the_memory(run: RunSpec, plan: Plan) -> Change | None:
    memory = run.cluster.memory_bytes()
    if memory is None:
        return None
    roomy = replace(run, cluster=replace(run.cluster, memory_gib=2 * memory / GiB))
    return _changed(f"twice the memory ({2 * memory / 1e9:.0f} GB)", run, roomy, plan)


def _narrow_sums(run: RunSpec, plan: Plan) -> Change | None:
    crossing = any(axis.axis == "replicate" and axis.crosses == "node" and axis.size > 1 for axis in plan.mesh)
    wide = (plan.precision.reduce_replicas or plan.precision.stored) == "fp32"
    if not (crossing and wide) or pins_of(run).reduce_replicas:
        return None
    narrow = replace(plan, precision=replace(plan.precision, reduce_replicas="bf16"))
    return _changed("plan.reduce_replicas=bf16", run, run, plan, narrow, note="sums over replicas lose precision")


def _low_products(run: RunSpec, plan: Plan) -> Change | None:
    precision = plan.precision
    known = "fp8" in CHIPS[run.cluster.gpu].peak_flops if run.cluster.gpu in CHIPS and not run.cluster.groups else False
    follow = any(layer.linear is None for layer in plan.layers)
    if not known or precision.compute != "bf16" or precision.linear != "compute" or not follow:
        return None
    low = replace(plan, precision=replace(precision, linear="fp8_tensorwise", gather="fp8"))
    refused = fp8_conflict(low, experts=run.model.experts > 0)
    if refused or not supports_fp8(run.model, run.train.seq_len, context_size(plan)):
        return None
    note = "linear layers round to fp8: hold the loss against a bf16 run"
    return _changed("plan.linear=fp8_tensorwise", run, run, plan, low, note=note)


CHANGES: tuple[Callable[[RunSpec, Plan], Change | None], ...] = (
    _twice_the_network, _twice_the_links, _twice_the_batch, _twice_the_memory, _narrow_sums, _low_products,
)  # fmt: skip


def _another_node(run: RunSpec, plan: Plan, searched: bool, trainable: bool) -> Change | None:
    """The next larger cluster that the batch divides over: its plan searched, or this one with more data ranks."""
    nodes = run.cluster.nodes
    if run.cluster.groups:
        return None
    for more in [*range(nodes + 1, nodes + SIZES), 2 * nodes]:
        larger = replace(run, cluster=replace(run.cluster, nodes=more))
        found = _searched(larger, trainable) if searched else _spread(larger, plan)
        if found is None:
            continue
        odd = (
            f"; {nodes + 1} nodes {'have no plan' if searched else 'do not divide this mesh'}"
            if more > nodes + 1
            else ""
        )
        added = "one more node" if more == nodes + 1 else f"{more - nodes} more nodes"
        return _change(
            f"{added} ({more} × {run.cluster.gpus_per_node} GPUs)", run, plan, larger, found, mesh_name(found) + odd
        )
    alone = plan.batch.micro_batch * plan.batch.accumulate == 1
    note = "the batch has no more sequences to give" if alone else "no larger cluster divides the batch"
    return _change("more nodes", run, plan, run, plan, note)


def _searched(run: RunSpec, trainable: bool) -> Plan | None:
    try:
        return search(run, trainable=trainable).best.plan
    except (BadInput, OutOfResources):
        return None


def _spread(run: RunSpec, plan: Plan) -> Plan | None:
    """`plan` over `run`'s nodes, the replicas (or shards where there are none) taking up what is new; None where that is not whole."""
    others = plan.ranks // plan.data_ranks
    data, odd = divmod(run.cluster.ranks, others)
    axis = "replicate" if plan.axis_size("replicate") > 1 else "shard"
    kept = plan.data_ranks // plan.axis_size(axis)
    if odd or data % kept or run.train.global_batch % data:
        return None
    per_rank = run.train.global_batch // data
    micro = math.gcd(per_rank, plan.batch.micro_batch)
    mesh = tuple(replace(one, size=data // kept, crosses="node") if one.axis == axis else one for one in plan.mesh)
    batch = BatchPlan(global_batch=run.train.global_batch, micro_batch=micro, accumulate=per_rank // micro)
    try:
        return _fastest(run, replace(plan, mesh=mesh, batch=batch))
    except BadInput:  # the schedule needs more micro-batches
        return None


def _changed(
    name: str, run: RunSpec, later: RunSpec, plan: Plan, start: Plan | None = None, note: str = ""
) -> Change | None:
    found = _fastest(later, start or plan)
    moved = [f"{key} {now}" for key, now, before in _settings(start or plan, found) if now != before]
    return _change(name, run, plan, later, found, ", ".join([*moved, *([note] if note else [])])) if found else None


def _change(name: str, run: RunSpec, plan: Plan, later: RunSpec, found: Plan, note: str) -> Change:
    before, seconds = _seconds(plan), _seconds(found)
    tokens = later.train.global_batch * later.train.seq_len / seconds
    return Change(name, seconds, tokens, tokens * before / (run.train.global_batch * run.train.seq_len) - 1, note)


def _settings(before: Plan, after: Plan | None) -> Iterator[tuple[str, object, object]]:
    if after is None:
        return
    yield "micro-batches of", after.batch.micro_batch, before.batch.micro_batch
    yield "gradients", after.layers[0].gradients, before.layers[0].gradients
    yield "recompute", _spread_of(after, "recompute"), _spread_of(before, "recompute")
    yield "reshard", _spread_of(after, "reshard"), _spread_of(before, "reshard")


def _spread_of(plan: Plan, field: str) -> str:
    """The values of a field over the layers, in words."""
    words = {True: "yes", False: "no"}
    return " and ".join(
        dict.fromkeys(str(words.get(value, value)) for value in (getattr(one, field) for one in plan.layers))
    )


def _fastest(run: RunSpec, plan: Plan) -> Plan | None:
    """The fastest plan round `plan` that fits `run`'s cluster; None when none does.

    Raises BadInput when the schedule cannot be made.
    """
    fitting = [near for near in _nearby(run, plan) if _fits(run, near)]
    if not fitting:
        return None
    fitting.sort(key=lambda near: _closed_seconds(run, near))
    start = replace(plan, predicted=None)
    chosen = fitting[:PLAYED] + ([start] if start in fitting[PLAYED:] else [])
    return min((repriced(run, near) for near in chosen), key=_seconds)


def _nearby(run: RunSpec, plan: Plan) -> Iterator[Plan]:
    """`plan`, and on its mesh every micro-batch with the layers that are fastest there and fit, as far as the run pins none of it."""
    yield replace(plan, predicted=None)
    held, budget = _held(run, plan), budget_of(run)
    space = points(held, trainable=untrainable(plan) is None)
    axes = [axis.axis for axis in plan.mesh if axis.size > 1]
    alike = [[axis for axis in mesh.order if mesh.size(axis) > 1] == axes for mesh in space.meshes]
    space = space.take(np.flatnonzero(np.array(alike, bool)[space.mesh]))
    priced, room = priced_or_refused(run.model, run.train, plan, run.cluster), math.inf if budget is None else budget
    for part in ROOMS if budget else ROOMS[:1]:
        for row, strategy in enumerate(strategies_in(held, priced, space, part * room)):
            if strategy is not None:
                yield plan_at(held, space, row, strategy, budget)


def _held(run: RunSpec, plan: Plan) -> RunSpec:
    """The run with what a change may not move pinned: mesh, schedule, formats, engines, what of all layers waits in host memory."""
    kept: dict[str, Any] = {axis: plan.axis_size(axis) for axis in AXES} | vars(plan.precision)
    kept |= {key: getattr(plan, key) for key in ("gather_engine", "tensor_engine", "compile")}
    kept |= {"schedule": plan.schedule.name, "stages": plan.schedule.stages or None}
    kept |= {"offload": plan.layers[0].offload} if len({layer.offload for layer in plan.layers}) == 1 else {}
    kept |= {"expert": plan.experts.expert} if plan.experts else {}
    kept |= {"layers": plan.layers} if any(layer.linear for layer in plan.layers) else {}
    return replace(run, plan=replace(pins_of(run), **kept))


def _fits(run: RunSpec, plan: Plan) -> bool:
    try:
        return fits(run, plan, budget_of(run))
    except BadInput:  # its schedule cannot be made for so few micro-batches
        return False


def _seconds(plan: Plan) -> float:
    known = plan.predicted.step_seconds if plan.predicted else None
    return math.inf if known is None else known


def _closed_seconds(run: RunSpec, plan: Plan) -> float:
    time = plan_time(run.model, run.train, plan, run.cluster)
    return time.seconds if time else math.inf


def _network(run: RunSpec) -> NetworkSpec:
    return run.cluster.network or NetworkSpec()


def _with_network(run: RunSpec, network: NetworkSpec) -> RunSpec:
    return replace(run, cluster=replace(run.cluster, network=network))
