"""Chooses the devices that a plan uses: all devices of the cluster, or a part of them if a step is shorter there.

A part is a smaller cluster: fewer nodes, fewer devices of each node, or the cluster without one type of node. For
example, a batch of 64 sequences does not divide evenly over 3 nodes of 7 devices, and a step on 16 of these devices is
shorter than a step of a pipeline on all 21. A part is searched only if a lower bound on its step time is below the step
time on all devices.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil, gcd, inf, prod
from typing import Any

from meshwright.costs.machine_rates import is_guessed
from meshwright.planner.candidate import SearchResult, pins_of
from meshwright.planner.search import search, seconds_bound
from meshwright.planner.space import divisors
from meshwright.simulator.slow_nodes import node_type_speeds
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, MeshwrightError, OutOfResources
from meshwright.spec.fields import to_plain
from meshwright.spec.network import NetworkSpec
from meshwright.spec.nodes import node_type_runs
from meshwright.spec.plan_keys import PlanKeys
from meshwright.spec.run import RunSpec

MIN_SPEEDUP = 1.02
"""A part is used only if its step is faster than a step on all devices by more than this factor."""
MAX_BOUNDS = 6
"""Maximum number of parts for which the lower bound is computed."""
MAX_SEARCHES = 4
"""Maximum number of parts that are searched."""
MAX_PLANS = 2
"""The search of parts ends when this many parts have a plan."""
MAX_INNER_RANKS = 64
"""Maximum number of devices per data rank (tensor × context × pipeline ranks) in the parts that are tried."""
MAX_NODE_TYPES = 4
"""Largest number of node types of which every subset is tried; also the largest number of nodes that a sentence lists
one by one.
"""


@dataclass(frozen=True)
class Idle:
    """Devices that a plan does not use, and the reason."""

    used: int
    """Number of devices that the plan uses."""
    devices: int
    """Number of devices of the whole cluster."""
    reason: str
    """Why the other devices stay idle."""
    seconds_with_all: float | None
    """Step time of the best plan on all devices; None if no plan fits there or its time is not known."""
    ranks_by_node: tuple[int, ...]
    """Number of ranks on each node that the plan uses, the largest first."""
    settings: str
    """The overrides that turn the run's cluster into the part, as on the command line."""
    start: str
    """Sentence that says how to start training on the part."""

    @property
    def sentence(self) -> str:
        """Return the first of the plan's reasons: how many devices are used, and why."""
        return f"uses {self.used:,} of {self.devices:,} devices ({describe_nodes(self.ranks_by_node)}): {self.reason}"


@dataclass(frozen=True)
class DeviceChoice:
    """The best plan on all devices or on a part of them."""

    run: RunSpec
    """The run, with the cluster for which the plan is made."""
    answer: SearchResult
    """The result of the search on that cluster."""
    idle: Idle | None = None
    """The idle devices; None if all are used."""


def choose_devices(run: RunSpec, *, memory_bytes: int | None = None, trainable: bool = True) -> DeviceChoice:
    """Return the best plan for `run`: on all devices, or on a part of them if it is more than 2% faster there or only a
    part has a plan.

    `memory_bytes` is the memory of a device, by default the cluster's. If `trainable` is true, only plans that this
    release can train are considered. If no devices have a plan, the error of `search` on all devices is raised.
    """
    whole = None
    failure = None
    try:
        whole = search(run, memory_bytes=memory_bytes, trainable=trainable)
    except (BadInput, OutOfResources) as error:
        failure = error
    limit = whole.best.seconds / MIN_SPEEDUP if whole else inf
    if whole and (is_guessed(run.cluster) or limit == inf):
        return DeviceChoice(run, whole)
    parts_with_plans: list[tuple[RunSpec, SearchResult]] = []
    for part, bound in _promising_parts(run, limit, trainable)[:MAX_SEARCHES]:
        if len(parts_with_plans) == MAX_PLANS or bound >= min(
            [limit, *(answer.best.seconds for _, answer in parts_with_plans)]
        ):
            break
        try:
            parts_with_plans.append((part, search(part, memory_bytes=memory_bytes, trainable=trainable)))
        except (BadInput, OutOfResources):
            continue
    part, answer = min(parts_with_plans, key=lambda pair: pair[1].best.seconds, default=(run, None))
    if answer is None or (whole and answer.best.seconds >= limit):
        if whole is None:
            assert failure is not None
            raise failure
        return DeviceChoice(run, whole)
    tried = [whole, *(answer for _, answer in parts_with_plans)]
    idle = _idle_devices(run, part, whole, failure)
    best = replace(answer.best, plan=replace(answer.best.plan, why=(idle.sentence, *answer.best.plan.why)))
    answer = replace(
        answer,
        best=best,
        considered=sum(result.considered for result in tried if result),
        seconds=sum(result.seconds for result in tried if result),
    )
    return DeviceChoice(part, answer, idle)


def describe_nodes(ranks_by_node: Sequence[int]) -> str:
    """Return the number of devices of each node as text.

    >>> describe_nodes([6, 6, 4])
    '6, 6 and 4 on 3 nodes'
    >>> describe_nodes([8] * 64)
    '8 on each of 64 nodes'
    """
    nodes = len(ranks_by_node)
    if len(set(ranks_by_node)) == 1:
        return f"{ranks_by_node[0]} on each of {nodes:,} nodes" if nodes > 1 else "on one node"
    if nodes > MAX_NODE_TYPES:
        return f"{ranks_by_node[0]} on each of {nodes - 1:,} nodes and {ranks_by_node[-1]} on one more"
    return f"{', '.join(map(str, ranks_by_node[:-1]))} and {ranks_by_node[-1]} on {nodes} nodes"


@dataclass(frozen=True)
class _Part:
    """A part of a cluster, with its expected speed."""

    cluster: ClusterSpec
    speed: float
    """Sum of the speeds of its devices, each relative to the slowest node type."""
    share: float
    """Share of that speed that remains after batch and layers are divided over the devices.

    It is below 1 if they divide unevenly.
    """


def _promising_parts(run: RunSpec, limit: float, trainable: bool) -> list[tuple[RunSpec, float]]:
    """Return the parts whose step may take less than `limit` seconds, each with a lower bound on it in seconds, the
    lowest bound first.
    """
    parts = sorted(_parts(run), key=lambda part: -part.speed * part.share)
    if limit < inf:
        single_device_seconds = _single_device_seconds(run)
        parts = [part for part in parts if single_device_seconds / part.speed < limit]
    bounded = []
    for part in parts[:MAX_BOUNDS]:
        smaller = replace(run, cluster=part.cluster)
        try:
            bound = seconds_bound(smaller, trainable=trainable)
        except BadInput:  # the part's devices do not support the dtype, or their rates are unknown
            continue
        if bound < limit:
            bounded.append((smaller, bound))
    return sorted(bounded, key=lambda pair: pair[1])


def _single_device_seconds(run: RunSpec) -> float:
    """Return the seconds of a step on one device of the slowest type if its memory were unlimited.

    This number divided by the speed of a part is a lower bound on the step time of the part.
    """
    pins = pins_of(run)
    speeds = node_type_speeds(run.model, run.train, run.cluster)
    formats = PlanKeys(compute=pins.compute, linear=pins.linear, gather=pins.gather)
    single = replace(run.cluster, nodes=1, gpus_per_node=1, groups=(), emulate_nodes=1)
    slowest_speed = speeds.get(node_type_runs(single)[0][0], 1.0)
    return seconds_bound(replace(run, cluster=single, plan=formats), trainable=False) * slowest_speed


def _parts(run: RunSpec) -> Iterator[_Part]:
    """Yield the parts that may be faster than all devices.

    There are three kinds: the cluster without some node types; one node, or one pod (nodes with full bandwidth to each
    other); and numbers of devices over which batch and layers divide more evenly.
    """
    cluster = run.cluster
    speeds = node_type_speeds(run.model, run.train, cluster) if cluster.groups else {}
    whole = _with_speed(run, cluster, speeds)
    yielded = {cluster}
    for part_cluster in (*_without_node_types(cluster), *_fewer_nodes(cluster)):
        if part_cluster not in yielded:
            yielded.add(part_cluster)
            yield _with_speed(run, part_cluster, speeds)
    for base in (cluster, *_without_node_types(cluster)):
        for part_cluster in _parts_by_inner_ranks(base, run.train.global_batch):
            part = _with_speed(run, part_cluster, speeds)
            if part_cluster not in yielded and part.speed * part.share > whole.speed * whole.share:
                yielded.add(part_cluster)
                yield part


def _with_speed(run: RunSpec, cluster: ClusterSpec, speeds: Mapping[Any, float]) -> _Part:
    """Return the part with its speed. `speeds` has the speed of each node type, relative to the slowest."""
    if cluster.groups or speeds:
        speed = cluster.gpus_per_node * sum(
            count * speeds.get(node_type, 1.0) for node_type, count in node_type_runs(cluster)
        )
    else:
        speed = float(cluster.ranks)
    return _Part(cluster, speed, _usable_share(run, cluster.ranks))


def _usable_share(run: RunSpec, ranks: int) -> float:
    """Return an estimate of the share of `ranks` that computes at a time, for the best division of batch, heads and
    layers.

    Ranks with fewer layers than others are idle for a part of the time, and so are pipeline stages before their first
    micro-batch arrives. The share is 0 if no division is possible.
    """
    pins = pins_of(run)
    batch = run.train.global_batch
    layers = run.model.layers
    inside = (pins.tensor, pins.context_ring, pins.context_ulysses)
    ranks_left, remainder = divmod(ranks, prod(size or 1 for size in (pins.pipeline, *inside)))
    if remainder:
        return 0.0
    data = gcd(batch, ranks_left)
    best = 0.0
    for head_ranks in divisors(1 if all(inside) else gcd(ranks_left // data, run.model.heads)):
        stages = ranks_left // data // head_ranks
        if pins.pipeline:
            stages *= pins.pipeline
        if stages == (pins.pipeline or stages) and stages <= layers:
            layer_balance = layers / (stages * ceil(layers / stages))
            pipeline_fill = batch / data / (batch / data + (stages - 1) / 2)
            best = max(best, layer_balance * pipeline_fill)
    return best


def _parts_by_inner_ranks(cluster: ClusterSpec, batch: int) -> Iterator[ClusterSpec]:
    """Yield, for 1, 2, 3, … devices per data rank, the part with the most devices in which the data ranks divide the
    batch.
    """
    tried_ranks = set()
    batches = divisors(batch)
    for inner in range(1, MAX_INNER_RANKS + 1):
        for unit in (1, cluster.ranks_per_node):  # once for any number of devices, once for whole nodes
            data = max((d for d in batches if d * inner < cluster.ranks and d * inner % unit == 0), default=0)
            ranks = data * inner
            if ranks and ranks not in tried_ranks:
                tried_ranks.add(ranks)
                yield from _part_of_size(cluster, ranks)


def _part_of_size(cluster: ClusterSpec, ranks: int) -> Iterator[ClusterSpec]:
    """Yield the part of `ranks` devices that takes an equal number of devices from each node, as large as possible.

    Nothing is yielded if there is none.

    A node may count as several smaller nodes. For example, 16 of 3 × 7 devices are 8 nodes of 2 devices, which use 6, 6
    and 4 devices of the real nodes. The cost model is then never too fast, because the small nodes communicate like
    separate nodes.
    """
    per_node = cluster.ranks_per_node
    nodes = cluster.nodes * cluster.emulate_nodes
    for share in range(min(per_node, ranks), 0, -1):
        shares_per_node = 1 if cluster.emulate_nodes > 1 else per_node // share
        count, remainder = divmod(ranks, share)
        if remainder or count > nodes * shares_per_node:
            continue
        if cluster.groups:
            if share == per_node:
                yield _without_slowest_nodes(cluster, count)
        elif cluster.emulate_nodes > 1:
            yield replace(cluster, gpus_per_node=ranks, emulate_nodes=count)
        else:
            host = cluster.host_memory_gib
            memory = host / shares_per_node if host and count > nodes else host
            yield replace(cluster, nodes=count, gpus_per_node=share, host_memory_gib=memory)
        return


def _fewer_nodes(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """Yield the cluster with one node, and with one pod of nodes: a slow network may cost more time than the other
    nodes save.

    Emulated nodes (groups of ranks on one host) are never left out.
    """
    pod = cluster.network.pod_nodes if cluster.network else None
    for nodes in (1, pod or 1):
        if nodes < cluster.nodes and not cluster.groups:
            yield replace(cluster, nodes=nodes)


def _without_node_types(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """Yield the cluster without some of its node types.

    With few node types, every subset is yielded. With more, each type is removed, and each type is used alone.
    """
    counts = (cluster.nodes - sum(group.nodes for group in cluster.groups), *(group.nodes for group in cluster.groups))
    present = [index for index, count in enumerate(counts) if count]
    sizes = range(1, len(present)) if len(present) <= MAX_NODE_TYPES else (1, len(present) - 1)
    for size in sizes:
        for subset in combinations(present, size):
            yield _with_node_counts(cluster, [count * (index in subset) for index, count in enumerate(counts)])


def _without_slowest_nodes(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    """Return the cluster with its `nodes` fastest nodes."""
    counts = [cluster.nodes - sum(group.nodes for group in cluster.groups), *(group.nodes for group in cluster.groups)]
    single_nodes = [
        _with_node_counts(cluster, [int(index == only_index) for index in range(len(counts))])
        for only_index in range(len(counts))
    ]
    order = sorted(range(len(counts)), key=lambda index: node_type_runs(single_nodes[index])[0][0].peak)
    remaining = cluster.nodes - nodes
    for index in order:
        removed = min(remaining, counts[index])
        counts[index] -= removed
        remaining -= removed
    return _with_node_counts(cluster, counts)


def _with_node_counts(cluster: ClusterSpec, counts: Sequence[int]) -> ClusterSpec:
    """Return the cluster with other numbers of nodes: `counts[0]` ungrouped nodes, and `counts[i + 1]` nodes of group
    i.

    If no ungrouped node remains, the cluster gets the fields of the first remaining group.
    """
    groups = [replace(group, nodes=count) for group, count in zip(cluster.groups, counts[1:], strict=True) if count]
    nodes = sum(counts)
    if counts[0] or not groups:
        return replace(cluster, nodes=nodes, groups=tuple(groups))
    first, *others = groups
    network = cluster.network or NetworkSpec()
    network = replace(
        network,
        link_gb_per_s=first.link_gb_per_s or network.link_gb_per_s,
        port_gb_per_s=first.port_gb_per_s or network.port_gb_per_s,
        fabric=first.fabric or network.fabric,
        port_us=None if first.fabric else network.port_us,
    )
    other_chip = first.gpu not in (None, cluster.gpu)
    others = [replace(group, gpu=group.gpu or cluster.gpu) for group in others]
    return replace(
        cluster,
        gpu=first.gpu or cluster.gpu,
        nodes=nodes,
        groups=tuple(others),
        network=network if network != NetworkSpec() else None,
        memory_gib=None if other_chip else cluster.memory_gib,
        profile=None if other_chip else cluster.profile,
    )


def _idle_devices(run: RunSpec, part: RunSpec, whole: SearchResult | None, failure: MeshwrightError | None) -> Idle:
    """Return the description of the devices that `part` does not use.

    `whole` is the best plan on all devices, or None; then `failure` is the error of its search.
    """
    devices = run.cluster.ranks
    batch = run.train.global_batch
    seconds = whole.best.seconds if whole else None
    clauses = []
    if len(node_type_runs(part.cluster)) < len(node_type_runs(run.cluster)):
        part_types = {node_type for node_type, _ in node_type_runs(part.cluster)}
        dropped = [
            f"{count} × {run.cluster.gpus_per_node} {node_type.gpu}"
            for node_type, count in node_type_runs(run.cluster)
            if node_type not in part_types
        ]
        refused = f", as {failure}" if isinstance(failure, BadInput) else ""
        clauses.append(f"without {' and '.join(dropped)}{refused}")
    elif batch % devices:
        clauses.append(f"{batch:,} sequences do not divide over {devices:,}")
    if seconds is not None:
        clauses.append(f"with all {devices:,} a step takes {seconds:.3g} s")
    elif isinstance(failure, OutOfResources):
        clauses.append(f"no plan over all {devices:,} fits")
    elif batch % devices:
        clauses.append(f"no layout uses all {devices:,}")
    by_node = _ranks_by_node(run.cluster, part.cluster)
    keys = settings(run.cluster, part.cluster)
    start = f"to train it: {keys}"
    if run.cluster.nodes == 1:
        start = f"`train` starts only {part.cluster.ranks} ranks; with a plan file it needs {keys}"
    elif len(by_node) > 1:
        start += f", and a launcher that starts {describe_nodes(by_node)}"
    return Idle(part.cluster.ranks, devices, "; ".join(clauses), seconds, by_node, keys, start)


def _ranks_by_node(cluster: ClusterSpec, part: ClusterSpec) -> tuple[int, ...]:
    """Return the number of the part's ranks on each node of `cluster` that it uses."""
    share = part.ranks_per_node
    count = part.ranks // share
    shares_per_node = cluster.ranks_per_node // share if count > cluster.nodes * cluster.emulate_nodes else 1
    full, remainder = divmod(count, shares_per_node)
    return (share * shares_per_node,) * full + ((share * remainder,) if remainder else ())


def settings(cluster: ClusterSpec, part: ClusterSpec) -> str:
    """Return the overrides that turn `cluster` into `part`, as on the command line: `cluster.nodes=64
    cluster.gpus_per_node=8`.
    """
    before = _flatten(to_plain(cluster))
    after = _flatten(to_plain(part))
    overrides = []
    for key, value in after.items():
        if value != before.get(key):
            overrides.append(f"cluster.{key}={_as_override_value(value)}")
    return " ".join(overrides)


def _as_override_value(value: Any) -> str:
    """Return a value as written in a command-line override, quoted for the shell."""
    if isinstance(value, list):
        group_fields = [{key: inner for key, inner in group.items() if inner is not None} for group in value]
        return shlex.quote(json.dumps(group_fields, separators=(",", ":")))
    return "none" if value is None else str(value)


def _flatten(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a cluster by dotted key: `network` is replaced by its own fields, such as
    `network.port_gb_per_s`.
    """
    network = plain.get("network") or {}
    return {key: value for key, value in plain.items() if key != "network"} | {
        f"network.{key}": value for key, value in network.items()
    }
