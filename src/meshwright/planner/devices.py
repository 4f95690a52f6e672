"""Which of a cluster's devices a plan uses: all, or a part of them where the batch, the model or slow nodes make that faster.

Every part is a cluster of its own: fewer nodes, fewer devices of each node, or the nodes without one kind. A batch of 64 sequences does not
divide over 3 × 7 devices, and 16 of them take a shorter step than a pipeline of 21. A part is searched only if a bound, below the time
of any of its plans, leaves it faster than all devices.
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
from meshwright.simulator.slow_nodes import kind_speeds
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput, MeshwrightError, OutOfResources
from meshwright.spec.fields import to_plain
from meshwright.spec.network import NetworkSpec
from meshwright.spec.nodes import node_type_runs
from meshwright.spec.plan import PlanPins
from meshwright.spec.run import RunSpec

GAIN = 1.02
"""Times that a step on all devices takes longer than on a part before the others stay idle."""
BOUNDED, TRIED, PLANNED = 6, 4, 2
"""Parts of which a bound is computed, which are searched, and which may turn out to have a plan."""
INNER = 64
"""Ranks of one data rank up to which a number of devices is a candidate."""
KINDS = 4
"""Kinds of nodes up to which every set of them is a candidate, and nodes that are named one by one."""


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
    """The best plan for `run` over all devices, or over a part of them that is more than 2% faster or alone has a plan.

    Raises what `search` raises over all devices where no part has a plan either.
    """
    whole, failure = None, None
    try:
        whole = search(run, memory_bytes=memory_bytes, trainable=trainable)
    except (BadInput, OutOfResources) as error:
        failure = error
    limit = whole.best.seconds / GAIN if whole else inf
    if whole and (is_guessed(run.cluster) or limit == inf):
        return Choice(run, whole)
    found: list[tuple[RunSpec, Answer]] = []
    for part, bound in _promising(run, limit, trainable)[:TRIED]:
        if len(found) == PLANNED or bound >= min([limit, *(answer.best.seconds for _, answer in found)]):
            break
        try:
            found.append((part, search(part, memory_bytes=memory_bytes, trainable=trainable)))
        except (BadInput, OutOfResources):
            continue
    part, answer = min(found, key=lambda one: one[1].best.seconds, default=(run, None))
    if answer is None or (whole and answer.best.seconds >= limit):
        if whole is None:
            assert failure is not None
            raise failure
        return Choice(run, whole)
    tried = [whole, *(answer for _, answer in found)]
    idle = _idle(run, part, whole, failure)
    best = replace(answer.best, plan=replace(answer.best.plan, why=(idle.sentence, *answer.best.plan.why)))
    answer = replace(
        answer,
        best=best,
        considered=sum(one.considered for one in tried if one),
        seconds=sum(one.seconds for one in tried if one),
    )
    return Choice(part, answer, idle)


def nodes_in_words(ranks_by_node: Sequence[int]) -> str:
    """How many devices of how many nodes: "6, 6 and 4 on 3 nodes", "8 on each of 64 nodes"."""
    nodes = len(ranks_by_node)
    if len(set(ranks_by_node)) == 1:
        return f"{ranks_by_node[0]} on each of {nodes:,} nodes" if nodes > 1 else "on one node"
    if nodes > KINDS:
        return f"{ranks_by_node[0]} on each of {nodes - 1:,} nodes and {ranks_by_node[-1]} on one more"
    return f"{', '.join(map(str, ranks_by_node[:-1]))} and {ranks_by_node[-1]} on {nodes} nodes"


@dataclass(frozen=True)
class _Part:
    """A part of a cluster, and what it promises."""

    cluster: ClusterSpec
    speed: float
    """Its devices, each counted by its speed against the slowest kind."""
    share: float
    """Of that speed, what the division of batch and layers over so many devices leaves."""


def _promising(run: RunSpec, limit: float, trainable: bool) -> list[tuple[RunSpec, float]]:
    """The parts that may take less than `limit` seconds, with a bound below the time of any of their plans; the least first."""
    parts = sorted(_parts(run), key=lambda part: -part.speed * part.share)
    if limit < inf:
        own = _alone_seconds(run)
        parts = [part for part in parts if own / part.speed < limit]
    bounded = []
    for part in parts[:BOUNDED]:
        smaller = replace(run, cluster=part.cluster)
        try:
            bound = seconds_bound(smaller, trainable=trainable)
        except BadInput:  # its devices lack the number format, or rates
            continue
        if bound < limit:
            bounded.append((smaller, bound))
    return sorted(bounded, key=lambda one: one[1])


def _alone_seconds(run: RunSpec) -> float:
    """Seconds of a step on one device of the slowest kind that had memory for all of it: no part does better than its share of that."""
    pins, speeds = pins_of(run), kind_speeds(run.model, run.train, run.cluster)
    formats = PlanPins(compute=pins.compute, linear=pins.linear, gather=pins.gather)
    alone = replace(run.cluster, nodes=1, gpus_per_node=1, groups=(), emulate_nodes=1)
    plain = speeds.get(node_type_runs(alone)[0][0], 1.0)
    return seconds_bound(replace(run, cluster=alone, plan=formats), trainable=False) * plain


def _parts(run: RunSpec) -> Iterator[_Part]:
    """The parts that may be faster than all devices: without a kind of nodes, on one node or below where the network narrows, and with
    numbers of devices over which batch and layers divide better."""
    cluster = run.cluster
    speeds = kind_speeds(run.model, run.train, cluster) if cluster.groups else {}
    whole = _measured(run, cluster, speeds)
    seen = {cluster}
    for fewer in (*_without_kinds(cluster), *_near(cluster)):
        if fewer not in seen:
            seen.add(fewer)
            yield _measured(run, fewer, speeds)
    for base in (cluster, *_without_kinds(cluster)):
        for fewer in _sizes(base, run.train.global_batch):
            part = _measured(run, fewer, speeds)
            if fewer not in seen and part.speed * part.share > whole.speed * whole.share:
                seen.add(fewer)
                yield part


def _measured(run: RunSpec, cluster: ClusterSpec, speeds: Mapping[Any, float]) -> _Part:
    if cluster.groups or speeds:
        speed = cluster.gpus_per_node * sum(count * speeds.get(kind, 1.0) for kind, count in node_type_runs(cluster))
    else:
        speed = float(cluster.ranks)
    return _Part(cluster, speed, _share(run, cluster.ranks))


def _share(run: RunSpec, ranks: int) -> float:
    """About what share of so many ranks computes, where batch, heads and layers divide as well as they can: layers that are not spread
    evenly leave ranks idle, and so do stages before the first micro-batch reaches them; 0 where nothing divides."""
    pins, batch, layers = pins_of(run), run.train.global_batch, run.model.layers
    inside = (pins.tensor, pins.context_ring, pins.context_ulysses)
    rest, odd = divmod(ranks, prod(size or 1 for size in (pins.pipeline, *inside)))
    if odd:
        return 0.0
    data = gcd(batch, rest)
    best = 0.0
    for split in divisors(1 if all(inside) else gcd(rest // data, run.model.heads)):
        stages = rest // data // split
        if pins.pipeline:
            stages *= pins.pipeline
        if stages == (pins.pipeline or stages) and stages <= layers:
            spread = layers / (stages * ceil(layers / stages))
            filled = batch / data / (batch / data + (stages - 1) / 2)
            best = max(best, spread * filled)
    return best


def _sizes(cluster: ClusterSpec, batch: int) -> Iterator[ClusterSpec]:
    """Parts with the most devices of those on which one data rank has 1, 2, 3, … ranks."""
    seen, batches = set(), divisors(batch)
    for inner in range(1, INNER + 1):
        for unit in (1, cluster.ranks_per_node):  # whole nodes too
            data = max((d for d in batches if d * inner < cluster.ranks and d * inner % unit == 0), default=0)
            ranks = data * inner
            if ranks and ranks not in seen:
                seen.add(ranks)
                yield from _of_size(cluster, ranks)


def _of_size(cluster: ClusterSpec, ranks: int) -> Iterator[ClusterSpec]:
    """The part of so many devices whose nodes are largest, where nodes can give them in equal shares.

    A node may give several shares: 16 of 3 × 7 devices are 8 shares of 2, which 6, 6 and 4 devices make up. Such a part is priced as
    if each share were a node, which is never faster than it is.
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
                yield _slowest_dropped(cluster, count)
        elif cluster.emulate_nodes > 1:
            yield replace(cluster, gpus_per_node=ranks, emulate_nodes=count)
        else:
            host = cluster.host_memory_gib
            memory = host / a_node if host and count > nodes else host
            yield replace(cluster, nodes=count, gpus_per_node=share, host_memory_gib=memory)
        return


def _near(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """One node, and the nodes below the level where the network narrows: a slow network may cost more than the other nodes give.

    Nodes that one host plays are there to be used.
    """
    pod = cluster.network.pod_nodes if cluster.network else None
    for nodes in (1, pod or 1):
        if nodes < cluster.nodes and not cluster.groups:
            yield replace(cluster, nodes=nodes)


def _without_kinds(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """The cluster without some of its kinds of nodes: any of them where they are few, else all but one and one alone."""
    counts = (cluster.nodes - sum(group.nodes for group in cluster.groups), *(group.nodes for group in cluster.groups))
    present = [place for place, count in enumerate(counts) if count]
    sizes = range(1, len(present)) if len(present) <= KINDS else (1, len(present) - 1)
    for size in sizes:
        for kept in combinations(present, size):
            yield _kept(cluster, [count * (place in kept) for place, count in enumerate(counts)])


def _slowest_dropped(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    """The fastest `nodes` nodes of unlike ones."""
    counts = [cluster.nodes - sum(group.nodes for group in cluster.groups), *(group.nodes for group in cluster.groups)]
    alone = [_kept(cluster, [int(place == own) for place in range(len(counts))]) for own in range(len(counts))]
    order = sorted(range(len(counts)), key=lambda place: node_type_runs(alone[place])[0][0].peak)
    left = cluster.nodes - nodes
    for place in order:
        dropped = min(left, counts[place])
        counts[place] -= dropped
        left -= dropped
    return _kept(cluster, counts)


def _kept(cluster: ClusterSpec, counts: Sequence[int]) -> ClusterSpec:
    """The cluster with so many of its plain nodes and of each group's; where no plain node is left, the first group becomes the plain
    ones."""
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
    other = first.gpu not in (None, cluster.gpu)
    others = [replace(group, gpu=group.gpu or cluster.gpu) for group in others]
    return replace(
        cluster,
        gpu=first.gpu or cluster.gpu,
        nodes=nodes,
        groups=tuple(others),
        network=network if network != NetworkSpec() else None,
        memory_gib=None if other else cluster.memory_gib,
        profile=None if other else cluster.profile,
    )


def _idle(run: RunSpec, part: RunSpec, whole: Answer | None, failure: MeshwrightError | None) -> Idle:
    devices, batch = run.cluster.ranks, run.train.global_batch
    seconds = whole.best.seconds if whole else None
    why = []
    if len(node_type_runs(part.cluster)) < len(node_type_runs(run.cluster)):
        kept = {kind for kind, _ in node_type_runs(part.cluster)}
        gone = [
            f"{count} × {run.cluster.gpus_per_node} {kind.gpu}"
            for kind, count in node_type_runs(run.cluster)
            if kind not in kept
        ]
        refused = f", as {failure}" if isinstance(failure, BadInput) else ""
        why.append(f"without {' and '.join(gone)}{refused}")
    elif batch % devices:
        why.append(f"{batch:,} sequences do not divide over {devices:,}")
    if seconds is not None:
        why.append(f"with all {devices:,} a step takes {seconds:.3g} s")
    elif isinstance(failure, OutOfResources):
        why.append(f"no plan over all {devices:,} fits")
    elif batch % devices:
        why.append(f"no layout uses all {devices:,}")
    by_node = _by_node(run.cluster, part.cluster)
    keys = settings(run.cluster, part.cluster)
    start = f"to train it: {keys}"
    if run.cluster.nodes == 1:
        start = f"`train` starts {part.cluster.ranks} ranks by itself; beside a plan file it needs {keys}"
    elif len(by_node) > 1:
        start += f", and a launcher that starts {nodes_in_words(by_node)}"
    return Idle(part.cluster.ranks, devices, "; ".join(why), seconds, by_node, keys, start)


def _by_node(cluster: ClusterSpec, part: ClusterSpec) -> tuple[int, ...]:
    """Ranks of the part on each of the cluster's nodes that it uses."""
    share = part.ranks_per_node
    count = part.ranks // share
    a_node = cluster.ranks_per_node // share if count > cluster.nodes * cluster.emulate_nodes else 1
    full, rest = divmod(count, a_node)
    return (share * a_node,) * full + ((share * rest,) if rest else ())


def settings(cluster: ClusterSpec, part: ClusterSpec) -> str:
    """What of `cluster` the run file must say differently to be `part`: `cluster.nodes=64 cluster.gpus_per_node=8`."""
    before, after = _flat(to_plain(cluster)), _flat(to_plain(part))
    words = []
    for key, value in after.items():
        if value != before.get(key):
            words.append(f"cluster.{key}={_as_word(value)}")
    return " ".join(words)


def _as_word(value: Any) -> str:
    """A value as an override writes it in a shell."""
    if isinstance(value, list):
        plain = [{key: inner for key, inner in group.items() if inner is not None} for group in value]
        return shlex.quote(json.dumps(plain, separators=(",", ":")))
    return "none" if value is None else str(value)


def _flat(plain: Mapping[str, Any]) -> dict[str, Any]:
    network = plain.get("network") or {}
    return {key: value for key, value in plain.items() if key != "network"} | {
        f"network.{key}": value for key, value in network.items()
    }
