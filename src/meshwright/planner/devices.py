"""Chooses the devices that a plan uses: all of the cluster, or a part of it where that is faster.

A part is a smaller cluster: fewer nodes, fewer devices of each node, or the cluster without one type of node. For example, a batch of 64
sequences does not divide over 3 × 7 devices, and on 16 of them a step is shorter than in a pipeline of 21. A part is searched only if a
lower bound on its step time is below the step time on all devices.
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
from meshwright.planner.candidate import Answer, pins_of
from meshwright.planner.search import search, seconds_bound
from meshwright.planner.space import divisors
from meshwright.simulator.slow_nodes import node_type_speeds
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, MeshwrightError, OutOfResources
from meshwright.spec.fields import to_plain
from meshwright.spec.network import NetworkSpec
from meshwright.spec.nodes import node_type_runs
from meshwright.spec.plan import PlanPins
from meshwright.spec.run import RunSpec

GAIN = 1.02
"""The planner uses a part of the devices if a step on all of them takes more than this many times as long."""
MAX_BOUNDS, MAX_SEARCHES, MAX_PLANS = 6, 4, 2
"""Most parts of which the lower bound is computed, which are searched, and of which a plan is found."""
MAX_INNER_RANKS = 64
"""Most devices per data rank of the parts that are tried."""
MAX_NODE_TYPES = 4
"""Node types up to which every subset of them is tried, and nodes up to which each is named in a sentence."""


@dataclass(frozen=True)
class Idle:
    """Devices that a plan leaves idle, and why."""

    used: int
    devices: int
    """Of the whole cluster."""
    reason: str
    seconds_with_all: float | None
    """A step of the best plan over all devices; None where there is none, or its time is not known."""
    ranks_by_node: tuple[int, ...]
    """Ranks on each node that the plan uses, most first."""
    settings: str
    """The keys of the run file that describe the part, as the command line takes them."""
    start: str
    """How to train on the part."""

    @property
    def sentence(self) -> str:
        return f"uses {self.used:,} of {self.devices:,} devices ({nodes_in_words(self.ranks_by_node)}): {self.reason}"


@dataclass(frozen=True)
class Choice:
    """The best plan over all devices or a part of them."""

    run: RunSpec
    """With the cluster that the plan is for."""
    answer: Answer
    idle: Idle | None = None


def choose_devices(run: RunSpec, *, memory_bytes: int | None = None, trainable: bool = True) -> Choice:
    """The best plan for `run` on all devices, or on a part of them that is more than 2% faster or alone has a plan.

    Raises as `search` does on all devices if no part has a plan either.
    """
    whole, failure = None, None
    try:
        whole = search(run, memory_bytes=memory_bytes, trainable=trainable)
    except (BadInput, OutOfResources) as error:
        failure = error
    limit = whole.best.seconds / GAIN if whole else inf
    if whole and (is_guessed(run.cluster) or limit == inf):
        return Choice(run, whole)
    parts_with_plans: list[tuple[RunSpec, Answer]] = []
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
        return Choice(run, whole)
    tried = [whole, *(answer for _, answer in parts_with_plans)]
    idle = _idle_devices(run, part, whole, failure)
    best = replace(answer.best, plan=replace(answer.best.plan, why=(idle.sentence, *answer.best.plan.why)))
    answer = replace(
        answer,
        best=best,
        considered=sum(result.considered for result in tried if result),
        seconds=sum(result.seconds for result in tried if result),
    )
    return Choice(part, answer, idle)


def nodes_in_words(ranks_by_node: Sequence[int]) -> str:
    """Devices of each node in words: "6, 6 and 4 on 3 nodes", "8 on each of 64 nodes"."""
    nodes = len(ranks_by_node)
    if len(set(ranks_by_node)) == 1:
        return f"{ranks_by_node[0]} on each of {nodes:,} nodes" if nodes > 1 else "on one node"
    if nodes > MAX_NODE_TYPES:
        return f"{ranks_by_node[0]} on each of {nodes - 1:,} nodes and {ranks_by_node[-1]} on one more"
    return f"{', '.join(map(str, ranks_by_node[:-1]))} and {ranks_by_node[-1]} on {nodes} nodes"


@dataclass(frozen=True)
class _Part:
    """A part of a cluster, with the factors of its expected speed."""

    cluster: ClusterSpec
    speed: float
    """Sum over its devices of their speed, relative to the slowest node type."""
    share: float
    """Share of that speed which remains when batch and layers are divided over this number of devices."""


def _promising_parts(run: RunSpec, limit: float, trainable: bool) -> list[tuple[RunSpec, float]]:
    """The parts whose step may take less than `limit` seconds, each with a lower bound on it, the lowest bound first."""
    parts = sorted(_parts(run), key=lambda part: -part.speed * part.share)
    if limit < inf:
        single_device_seconds = _single_device_seconds(run)
        parts = [part for part in parts if single_device_seconds / part.speed < limit]
    bounded = []
    for part in parts[:MAX_BOUNDS]:
        smaller = replace(run, cluster=part.cluster)
        try:
            bound = seconds_bound(smaller, trainable=trainable)
        except BadInput:  # its devices lack the dtype, or have no known rates
            continue
        if bound < limit:
            bounded.append((smaller, bound))
    return sorted(bounded, key=lambda pair: pair[1])


def _single_device_seconds(run: RunSpec) -> float:
    """Seconds of a step on one device of the slowest type with unlimited memory.

    Divided by the speed of a part, this is a lower bound on the step time of the part.
    """
    pins, speeds = pins_of(run), node_type_speeds(run.model, run.train, run.cluster)
    formats = PlanPins(compute=pins.compute, linear=pins.linear, gather=pins.gather)
    single = replace(run.cluster, nodes=1, gpus_per_node=1, groups=(), emulate_nodes=1)
    plain = speeds.get(node_type_runs(single)[0][0], 1.0)
    return seconds_bound(replace(run, cluster=single, plan=formats), trainable=False) * plain


def _parts(run: RunSpec) -> Iterator[_Part]:
    """The parts that may be faster than all devices.

    They leave out a node type, stay on one node or below the level where the network narrows, or have a number of devices over which batch
    and layers divide better.
    """
    cluster = run.cluster
    speeds = node_type_speeds(run.model, run.train, cluster) if cluster.groups else {}
    whole = _part_of(run, cluster, speeds)
    seen = {cluster}
    for fewer in (*_without_node_types(cluster), *_fewer_nodes(cluster)):
        if fewer not in seen:
            seen.add(fewer)
            yield _part_of(run, fewer, speeds)
    for base in (cluster, *_without_node_types(cluster)):
        for fewer in _sizes(base, run.train.global_batch):
            part = _part_of(run, fewer, speeds)
            if fewer not in seen and part.speed * part.share > whole.speed * whole.share:
                seen.add(fewer)
                yield part


def _part_of(run: RunSpec, cluster: ClusterSpec, speeds: Mapping[Any, float]) -> _Part:
    if cluster.groups or speeds:
        speed = cluster.gpus_per_node * sum(
            count * speeds.get(node_type, 1.0) for node_type, count in node_type_runs(cluster)
        )
    else:
        speed = float(cluster.ranks)
    return _Part(cluster, speed, _usable_share(run, cluster.ranks))


def _usable_share(run: RunSpec, ranks: int) -> float:
    """Estimated share of `ranks` that computes under the best division of batch, heads and layers; 0 where nothing divides.

    Unevenly spread layers leave ranks idle, and so do pipeline stages before their first micro-batch arrives.
    """
    pins, batch, layers = pins_of(run), run.train.global_batch, run.model.layers
    inside = (pins.tensor, pins.context_ring, pins.context_ulysses)
    ranks_left, odd = divmod(ranks, prod(size or 1 for size in (pins.pipeline, *inside)))
    if odd:
        return 0.0
    data = gcd(batch, ranks_left)
    best = 0.0
    for head_ranks in divisors(1 if all(inside) else gcd(ranks_left // data, run.model.heads)):
        stages = ranks_left // data // head_ranks
        if pins.pipeline:
            stages *= pins.pipeline
        if stages == (pins.pipeline or stages) and stages <= layers:
            spread = layers / (stages * ceil(layers / stages))
            filled = batch / data / (batch / data + (stages - 1) / 2)
            best = max(best, spread * filled)
    return best


def _sizes(cluster: ClusterSpec, batch: int) -> Iterator[ClusterSpec]:
    """For 1, 2, 3, … ranks per data rank, the part with the most devices."""
    seen, batches = set(), divisors(batch)
    for inner in range(1, MAX_INNER_RANKS + 1):
        for unit in (1, cluster.ranks_per_node):  # any number of devices, and whole nodes
            data = max((d for d in batches if d * inner < cluster.ranks and d * inner % unit == 0), default=0)
            ranks = data * inner
            if ranks and ranks not in seen:
                seen.add(ranks)
                yield from _of_size(cluster, ranks)


def _of_size(cluster: ClusterSpec, ranks: int) -> Iterator[ClusterSpec]:
    """The part of `ranks` devices with the largest equal share per node, where equal shares are possible.

    A node may give several shares: 16 of 3 × 7 devices are 8 shares of 2 (6, 6 and 4 devices). Such a part is priced as if each share were
    a node, which is never faster than the real nodes.
    """
    per_node = cluster.ranks_per_node
    nodes = cluster.nodes * cluster.emulate_nodes
    for share in range(min(per_node, ranks), 0, -1):
        a_node = 1 if cluster.emulate_nodes > 1 else per_node // share
        count, odd = divmod(ranks, share)
        if odd or count > nodes * a_node:
            continue
        if cluster.groups:
            if share == per_node:
                yield _without_slowest_nodes(cluster, count)
        elif cluster.emulate_nodes > 1:
            yield replace(cluster, gpus_per_node=ranks, emulate_nodes=count)
        else:
            host = cluster.host_memory_gib
            memory = host / a_node if host and count > nodes else host
            yield replace(cluster, nodes=count, gpus_per_node=share, host_memory_gib=memory)
        return


def _fewer_nodes(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """One node, and one pod of nodes: a slow network may cost more time than the other nodes save.

    Emulated nodes are always used.
    """
    pod = cluster.network.pod_nodes if cluster.network else None
    for nodes in (1, pod or 1):
        if nodes < cluster.nodes and not cluster.groups:
            yield replace(cluster, nodes=nodes)


def _without_node_types(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """The cluster without some of its node types: every subset of few types, else each type left out or kept alone."""
    counts = (cluster.nodes - sum(group.nodes for group in cluster.groups), *(group.nodes for group in cluster.groups))
    present = [index for index, count in enumerate(counts) if count]
    sizes = range(1, len(present)) if len(present) <= MAX_NODE_TYPES else (1, len(present) - 1)
    for size in sizes:
        for kept in combinations(present, size):
            yield _with_node_counts(cluster, [count * (index in kept) for index, count in enumerate(counts)])


def _without_slowest_nodes(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    """The fastest `nodes` nodes of a cluster of unlike nodes."""
    counts = [cluster.nodes - sum(group.nodes for group in cluster.groups), *(group.nodes for group in cluster.groups)]
    one_node = [
        _with_node_counts(cluster, [int(index == kept_index) for index in range(len(counts))])
        for kept_index in range(len(counts))
    ]
    order = sorted(range(len(counts)), key=lambda index: node_type_runs(one_node[index])[0][0].peak)
    left = cluster.nodes - nodes
    for index in order:
        dropped = min(left, counts[index])
        counts[index] -= dropped
        left -= dropped
    return _with_node_counts(cluster, counts)


def _with_node_counts(cluster: ClusterSpec, counts: Sequence[int]) -> ClusterSpec:
    """The cluster with `counts` nodes: of its ungrouped nodes, then of each group.

    Where no ungrouped node is left, the fields of the first group become those of the cluster.
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


def _idle_devices(run: RunSpec, part: RunSpec, whole: Answer | None, failure: MeshwrightError | None) -> Idle:
    devices, batch = run.cluster.ranks, run.train.global_batch
    seconds = whole.best.seconds if whole else None
    clauses = []
    if len(node_type_runs(part.cluster)) < len(node_type_runs(run.cluster)):
        kept = {node_type for node_type, _ in node_type_runs(part.cluster)}
        dropped = [
            f"{count} × {run.cluster.gpus_per_node} {node_type.gpu}"
            for node_type, count in node_type_runs(run.cluster)
            if node_type not in kept
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
    by_node = _by_node(run.cluster, part.cluster)
    keys = settings(run.cluster, part.cluster)
    start = f"to train it: {keys}"
    if run.cluster.nodes == 1:
        start = f"`train` starts only {part.cluster.ranks} ranks; with a plan file it needs {keys}"
    elif len(by_node) > 1:
        start += f", and a launcher that starts {nodes_in_words(by_node)}"
    return Idle(part.cluster.ranks, devices, "; ".join(clauses), seconds, by_node, keys, start)


def _by_node(cluster: ClusterSpec, part: ClusterSpec) -> tuple[int, ...]:
    """Ranks of the part on each node that it uses."""
    share = part.ranks_per_node
    count = part.ranks // share
    a_node = cluster.ranks_per_node // share if count > cluster.nodes * cluster.emulate_nodes else 1
    full, remainder = divmod(count, a_node)
    return (share * a_node,) * full + ((share * remainder,) if remainder else ())


def settings(cluster: ClusterSpec, part: ClusterSpec) -> str:
    """The overrides that turn `cluster` into `part`, as on the command line: `cluster.nodes=64 cluster.gpus_per_node=8`."""
    before, after = _flat(to_plain(cluster)), _flat(to_plain(part))
    words = []
    for key, value in after.items():
        if value != before.get(key):
            words.append(f"cluster.{key}={_as_word(value)}")
    return " ".join(words)


def _as_word(value: Any) -> str:
    """A value as written in a command-line override, quoted for the shell."""
    if isinstance(value, list):
        plain = [{key: inner for key, inner in group.items() if inner is not None} for group in value]
        return shlex.quote(json.dumps(plain, separators=(",", ":")))
    return "none" if value is None else str(value)


def _flat(plain: Mapping[str, Any]) -> dict[str, Any]:
    network = plain.get("network") or {}
    return {key: value for key, value in plain.items() if key != "network"} | {
        f"network.{key}": value for key, value in network.items()
    }
