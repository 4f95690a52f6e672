"""Predicts how much faster a run would be with a changed cluster or job.

A full search for every change would take as long as the first search. So a change keeps the mesh of the chosen plan,
and only micro-batch size, gradients, recomputation and resharding are chosen again. Only for more nodes, on which the
mesh does not fit, a search is run, if the first search was quick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.costs.machine_rates import machine_of
from meshwright.costs.plan_costs import as_nodes, number, plan_time
from meshwright.planner.candidate import fits, memory_budget, pins_of, untrainable
from meshwright.planner.finalists import plan_at
from meshwright.planner.reprice import reprice
from meshwright.planner.search import search
from meshwright.planner.space import AXES, points
from meshwright.planner.sweep import strategies_in
from meshwright.simulator.step_simulation import require_cost_inputs
from meshwright.spec.chips import GiB
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.fp8_limits import supports_fp8
from meshwright.spec.network import NetworkSpec
from meshwright.spec.plan import BatchPlan, Plan
from meshwright.spec.plan_keys import keys_of
from meshwright.spec.plan_name import mesh_name
from meshwright.spec.run import RunSpec
from meshwright.workload.copy_options import COPY_OPTIONS
from meshwright.workload.groups import context_size

MAX_SEARCH_SECONDS = 0.5
"""A search is quick if it takes at most this many seconds."""
MAX_SIMULATED = 2
"""Number of plans per change that are simulated: the best ones by the closed form."""
MARGINS = (1.05, 0.97)
"""Factors on the memory limit that the closed form uses, because it differs a little from the exact memory model."""
MAX_SIZES = 8
"""Number of larger cluster sizes that are tried until one has a plan."""


@dataclass(frozen=True)
class Change:
    """The predicted effect of a change."""

    name: str
    """What is changed, for example "twice the batch (512 sequences)"."""
    seconds: float
    """Predicted seconds of a step with the change."""
    tokens_per_second: float
    """Predicted tokens per second of all GPUs with the change."""
    gain: float
    """Relative increase of tokens per second: 0.1 is 10% more."""
    note: str
    """Settings of the plan that differ with the change, or a remark; may be empty."""


@dataclass(frozen=True)
class _Changed:
    """A changed run, and the plan from which its variants start."""

    name: str
    run: RunSpec
    start: Plan
    remark: str = ""
    """A remark for `Change.note`."""


def what_if(
    run: RunSpec, plan: Plan, *, search_seconds: float = math.inf, trainable: bool = True
) -> tuple[Change, ...]:
    """Return changes with their predicted gain, the largest gain first.

    `search_seconds` is the time of the search that found `plan`. Empty if no step time is known, and for plans with
    hybrid ranks.
    """
    if plan.predicted is None or plan.predicted.step_seconds is None or plan.axis_size("hybrid") > 1:
        return ()
    run = replace(run, cluster=as_nodes(run.cluster))
    # Every change starts from the fastest variant of the plan on the present cluster, and its gain is relative to
    # that variant. So a gain does not include settings that are better without the change too, and a change that can
    # only help is never slower.
    fastest = min((variant for variant in (reprice(run, plan), _fastest(run, plan)) if variant), key=_seconds)
    changes = [
        change
        for make in CHANGES
        if (changed := make(run, fastest)) and (change := _priced(run, plan, fastest, changed))
    ]
    if larger_cluster := _more_nodes(run, fastest, search_seconds <= MAX_SEARCH_SECONDS, trainable):
        changes.append(larger_cluster)
    return tuple(sorted(changes, key=lambda change: -change.gain))


def _twice_the_network(run: RunSpec, plan: Plan) -> _Changed | None:
    """Return the run with twice the bandwidth between nodes; None with one node."""
    if run.cluster.nodes == 1:
        return None
    rate = 2 * number(machine_of(run.cluster, plan.precision.compute).nic) / 1e9
    faster = _with_network(run, replace(_network(run), port_gb_per_s=rate))
    return _Changed(f"twice the network ({rate:.4g} GB/s a GPU)", faster, plan)


def _twice_the_links(run: RunSpec, plan: Plan) -> _Changed | None:
    """Return the run with twice the bandwidth inside a node; None with one GPU per node."""
    if run.cluster.gpus_per_node == 1:
        return None
    rate = 2 * number(machine_of(run.cluster, plan.precision.compute).link) / 1e9
    faster = _with_network(run, replace(_network(run), link_gb_per_s=rate))
    return _Changed(f"twice the links in a node ({rate:.4g} GB/s a GPU)", faster, plan)


def _twice_the_batch(run: RunSpec, plan: Plan) -> _Changed | None:
    """Return the run with twice the global batch, as twice as many micro-batches."""
    batch = 2 * run.train.global_batch
    larger = replace(run, train=replace(run.train, global_batch=batch))
    doubled = replace(plan.batch, global_batch=batch, accumulate=2 * plan.batch.accumulate)
    return _Changed(f"twice the batch ({batch} sequences)", larger, replace(plan, batch=doubled))


def _twice_the_memory(run: RunSpec, plan: Plan) -> _Changed | None:
    """Return the run with twice the memory per GPU; None if the memory is not known."""
    memory = run.cluster.memory_bytes()
    if memory is None:
        return None
    roomy = replace(run, cluster=replace(run.cluster, memory_gib=2 * memory / GiB))
    return _Changed(f"twice the memory ({2 * memory / 1e9:.0f} GB)", roomy, plan)


def _bf16_replica_sums(run: RunSpec, plan: Plan) -> _Changed | None:
    """Return the plan with gradients that are reduced over replicas in bf16.

    The result is None unless replicas are on several nodes and use fp32.
    """
    crossing = any(axis.axis == "replicate" and axis.crosses == "node" and axis.size > 1 for axis in plan.mesh)
    wide = (plan.precision.reduce_replicas or plan.precision.stored) == "fp32"
    if not (crossing and wide) or pins_of(run).reduce_replicas:
        return None
    narrow = replace(plan, precision=replace(plan.precision, reduce_replicas="bf16"))
    return _Changed("plan.reduce_replicas=bf16", run, narrow, "sums over replicas lose precision")


def _fp8_matmuls(run: RunSpec, plan: Plan) -> _Changed | None:
    """Return the plan with fp8 matmuls.

    The result is None if the chip, the model or this release does not support them, or the plan has them.
    """
    precision = plan.precision
    known = run.cluster.peak_flops("fp8") is not None
    follow = any(layer.linear is None for layer in plan.layers)
    if not known or precision.compute != "bf16" or precision.linear != "compute" or not follow:
        return None
    low = replace(plan, precision=replace(precision, linear="fp8_tensorwise", gather="fp8"))
    if untrainable(low) or not supports_fp8(run.model, run.train.seq_len, context_size(plan)):
        return None
    remark = "linear layers round to fp8: compare the loss with that of a bf16 run"
    return _Changed("plan.linear=fp8_tensorwise", run, low, remark)


CHANGES: tuple[Callable[[RunSpec, Plan], _Changed | None], ...] = (
    _twice_the_network,
    _twice_the_links,
    _twice_the_batch,
    _twice_the_memory,
    _bf16_replica_sums,
    _fp8_matmuls,
)
"""The changes that are tried. Each returns None if it does not apply."""


def _priced(run: RunSpec, plan: Plan, fastest: Plan, changed: _Changed) -> Change | None:
    """Return a change with its gain over `fastest`. The note names the settings in which it differs from `plan`."""
    later = _fastest(changed.run, changed.start)
    if later is None:
        return None
    settings = [f"{key} {now}" for key, now, before in _settings(plan, later) if now != before]
    return _change(changed.name, run, fastest, changed.run, later, ", ".join(filter(None, (*settings, changed.remark))))


def _more_nodes(run: RunSpec, plan: Plan, searched: bool, trainable: bool) -> Change | None:
    """Return the change to the next larger cluster over which the batch divides.

    Its plan is found by a search if `searched`; otherwise it is this plan with more data ranks. None if nodes differ.
    """
    nodes = run.cluster.nodes
    if run.cluster.groups:
        return None
    for more in [*range(nodes + 1, nodes + MAX_SIZES), 2 * nodes]:
        larger = replace(run, cluster=replace(run.cluster, nodes=more))
        larger_plan = _search_plan(larger, trainable) if searched else _with_more_data_ranks(larger, plan)
        if larger_plan is None:
            continue
        why_skipped = "has no plan" if searched else "does not fit this layout and batch"
        skipped_sizes = f"; one more node {why_skipped}" if more > nodes + 1 else ""
        added = "one more node" if more == nodes + 1 else f"{more - nodes} more nodes"
        return _change(
            f"{added} ({more} × {run.cluster.gpus_per_node} GPUs)",
            run,
            plan,
            larger,
            larger_plan,
            mesh_name(larger_plan) + skipped_sizes,
        )
    single_micro_batch = plan.batch.micro_batch * plan.batch.accumulate == 1
    note = (
        "the batch has no sequences for further ranks"
        if single_micro_batch
        else "no larger cluster that was tried divides the batch"
    )
    return _change("more nodes", run, plan, run, plan, note)


def _search_plan(run: RunSpec, trainable: bool) -> Plan | None:
    """Return the best plan of a run; None if it has none."""
    try:
        return search(run, trainable=trainable).best.plan
    except (BadInput, OutOfResources):
        return None


def _with_more_data_ranks(run: RunSpec, plan: Plan) -> Plan | None:
    """Return `plan` on all nodes of `run`, with more replicas, or more shard ranks if it has no replicas.

    The result is None if the ranks do not divide.
    """
    other_ranks = plan.ranks // plan.data_ranks
    data, remainder = divmod(run.cluster.ranks, other_ranks)
    axis = "replicate" if plan.axis_size("replicate") > 1 else "shard"
    other_data_ranks = plan.data_ranks // plan.axis_size(axis)
    if remainder or data % other_data_ranks or run.train.global_batch % data:
        return None
    per_rank = run.train.global_batch // data
    micro = math.gcd(per_rank, plan.batch.micro_batch)
    mesh = tuple(
        replace(axis_entry, size=data // other_data_ranks, crosses="node") if axis_entry.axis == axis else axis_entry
        for axis_entry in plan.mesh
    )
    batch = BatchPlan(global_batch=run.train.global_batch, micro_batch=micro, accumulate=per_rank // micro)
    try:
        return _fastest(run, replace(plan, mesh=mesh, batch=batch))
    except BadInput:  # the schedule needs more micro-batches
        return None


def _change(name: str, run: RunSpec, plan: Plan, later: RunSpec, changed_plan: Plan, note: str) -> Change:
    """Return the change from `plan` of `run` to `changed_plan` of `later`."""
    before = _seconds(plan)
    seconds = _seconds(changed_plan)
    tokens = later.train.global_batch * later.train.seq_len / seconds
    return Change(name, seconds, tokens, tokens * before / (run.train.global_batch * run.train.seq_len) - 1, note)


def _settings(before: Plan, after: Plan) -> Iterator[tuple[str, object, object]]:
    """Yield (name, value in `after`, value in `before`) of the settings that a change may adapt."""
    yield "micro-batches of", after.batch.micro_batch, before.batch.micro_batch
    yield "gradients", after.layers[0].gradients, before.layers[0].gradients
    yield "recompute", _values_over_layers(after, "recompute"), _values_over_layers(before, "recompute")
    yield "reshard", _values_over_layers(after, "reshard"), _values_over_layers(before, "reshard")


def _values_over_layers(plan: Plan, field: str) -> str:
    """Return the values that a field has in the layer strategies, as text.

    The first 8 layers keep their gathered weights, the others do not:

    >>> from meshwright.spec.plan import BatchPlan, LayerStrategy, MeshAxis
    >>> layers = (LayerStrategy(range="0-7", reshard=False), LayerStrategy(range="8-31"))
    >>> axes = (MeshAxis(axis="shard", size=2),)
    >>> batch = BatchPlan(global_batch=2, micro_batch=1, accumulate=1)
    >>> _values_over_layers(Plan(mesh=axes, batch=batch, layers=layers), "reshard")
    'no and yes'
    """
    words = {True: "yes", False: "no"}
    return " and ".join(
        dict.fromkeys(str(words.get(value, value)) for value in (getattr(layer, field) for layer in plan.layers))
    )


def _fastest(run: RunSpec, plan: Plan) -> Plan | None:
    """Return the fastest variant of `plan` that fits on the cluster of `run`; None if none fits.

    Raises BadInput if the schedule does not support the number of micro-batches.
    """
    fitting = [candidate for candidate in _variants(run, plan) if _fits(run, candidate)]
    if not fitting:
        return None
    fitting.sort(key=lambda candidate: _closed_seconds(run, candidate))
    start = replace(plan, predicted=None)
    chosen = fitting[:MAX_SIMULATED] + ([start] if start in fitting[MAX_SIMULATED:] else [])
    return min((reprice(run, candidate) for candidate in chosen), key=_seconds)


def _variants(run: RunSpec, plan: Plan) -> Iterator[Plan]:
    """Yield `plan`, then on its mesh each micro-batch size that is not pinned, with the fastest layer strategies that
    fit.
    """
    yield replace(plan, predicted=None)
    pinned = _pin_all_but_changed(run, plan)
    budget = memory_budget(run)
    space = points(pinned, trainable=untrainable(plan) is None)
    axes = [axis.axis for axis in plan.mesh if axis.size > 1]
    same_axes = [[axis for axis in mesh.order if mesh.size(axis) > 1] == axes for mesh in space.meshes]
    space = space.take(np.flatnonzero(np.array(same_axes, bool)[space.mesh]))
    priced = require_cost_inputs(run.model, run.train, plan, run.cluster)
    memory_limit = math.inf if budget is None else budget
    for margin in MARGINS if budget else MARGINS[:1]:
        for index, strategy in enumerate(strategies_in(pinned, priced, space, margin * memory_limit)):
            if strategy is not None:
                yield plan_at(pinned, space, index, strategy, budget)


def _pin_all_but_changed(run: RunSpec, plan: Plan) -> RunSpec:
    """Return the run with pins for everything that a change keeps.

    These are the mesh, the schedule, number formats, transports, experts, and the value of offload if it is the same in
    all layers.
    """
    pins: dict[str, Any] = {axis: plan.axis_size(axis) for axis in AXES} | vars(plan.precision)
    pins |= {key: getattr(plan, key) for key in (*(option.key for option in COPY_OPTIONS), "compile")}
    pins |= {"schedule": plan.schedule.name, "stages": plan.schedule.stages or None}
    pins |= {"offload": plan.layers[0].offload} if len({layer.offload for layer in plan.layers}) == 1 else {}
    pins |= {key: value for key, value in vars(keys_of(plan)).items() if key.startswith("expert")}
    pins |= {"layers": plan.layers} if any(layer.linear for layer in plan.layers) else {}
    return replace(run, plan=replace(pins_of(run), **pins))


def _fits(run: RunSpec, plan: Plan) -> bool:
    try:
        return fits(run, plan, memory_budget(run))
    except BadInput:  # the schedule needs more micro-batches
        return False


def _seconds(plan: Plan) -> float:
    """Return the predicted step time; infinite if it is not known."""
    known = plan.predicted.step_seconds if plan.predicted else None
    return math.inf if known is None else known


def _closed_seconds(run: RunSpec, plan: Plan) -> float:
    """Return the step time by the closed form; infinite if it is not known."""
    time = plan_time(run.model, run.train, plan, run.cluster)
    return time.seconds if time else math.inf


def _network(run: RunSpec) -> NetworkSpec:
    return run.cluster.network or NetworkSpec()


def _with_network(run: RunSpec, network: NetworkSpec) -> RunSpec:
    return replace(run, cluster=replace(run.cluster, network=network))
