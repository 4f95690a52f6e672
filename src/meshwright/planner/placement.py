"""The order of mesh axes on the network's levels: which orders can differ in what they cost.

Tensor ranks are innermost, then context: they talk inside every layer. Shards, replicas and stages come in any order, for which of them
should have the fast links depends on their bytes. Where nodes are unlike, orders that keep every stage on nodes of one kind come first, so
that only stage boundaries cross from kind to kind (Holmes, arXiv 2312.03549).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from math import inf, prod
from statistics import fmean

from meshwright.costs.machine_rates import fast_domain
from meshwright.costs.plan_costs import as_nodes
from meshwright.simulator.slow_nodes import kind_speeds, rank_speeds
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import Layout
from meshwright.spec.nodes import node_type_runs, node_types_by_rank, slowest_rank_cluster
from meshwright.spec.plan import AxisName
from meshwright.spec.run import RunSpec

OUTER: tuple[AxisName, ...] = ("pipeline", "replicate", "shard")
"""Axes whose order is open, outermost first as most networks want them: a stage boundary has the fewest bytes, a gather the most."""
INNER: tuple[AxisName, ...] = ("context_ring", "context_ulysses", "tensor")


def orders(cluster: ClusterSpec, sizes: Mapping[str, int]) -> list[tuple[AxisName, ...]]:
    """Orders of all axes, outermost first, no two of which cross the same borders; an axis that `sizes` leaves out has one rank.

    Stages of one kind of node first, then the pipeline outermost. Sizes must multiply to the cluster's ranks.
    """
    three = tuple(sizes.get(axis, 1) for axis in OUTER)
    inner = prod(sizes.get(axis, 1) for axis in INNER)
    unlike = cluster if len(node_type_runs(cluster)) > 1 else None
    return [(*outer, *INNER) for outer in _outer_orders(_levels(cluster), cluster.ranks_per_node, three, inner, unlike)]


@dataclass(frozen=True)
class Ground:
    """What a layout makes of unlike nodes."""

    pace: float
    """A step's time over that of a cluster with none but the slowest nodes, if pipeline ranks get layers by their speed."""
    port: float
    """Bytes/s of a device's port inside the slowest stage: the bridge's where a stage lies on nodes of different fabrics."""


def ground_of(run: RunSpec) -> Callable[[Layout], Ground] | None:
    """How a layout lies on the run's nodes; None where these are alike, or the cost model knows nothing of them."""
    cluster = run.cluster
    if len(node_type_runs(cluster)) == 1 or not (speeds := kind_speeds(run.model, run.train, cluster)):
        return None

    def ground(layout: Layout) -> Ground:
        slowest, _ = node_type_runs(slowest_rank_cluster(cluster, layout))[0]
        return Ground(1 / fmean(rank_speeds(speeds, cluster, layout)), slowest.port)

    return ground


@lru_cache(maxsize=1 << 16)
def _outer_orders(
    levels: tuple[float, ...], per_node: int, three: tuple[int, ...], inner: int, unlike: ClusterSpec | None
) -> tuple[tuple[AxisName, ...], ...]:
    """Of the orders of `OUTER`, the first of each set that crosses alike."""
    size = dict(zip(OUTER, three, strict=True))
    found: dict[tuple[object, ...], tuple[int, tuple[AxisName, ...]]] = {}
    for order in permutations(OUTER):
        layout = Layout((*((axis, size[axis]) for axis in order), ("tensor", inner)), per_node)
        crossed: tuple[object, ...] = tuple(_members(layout, axis, level) for axis in OUTER for level in levels)
        kinds = node_types_by_rank(unlike, layout) if unlike else ()
        found.setdefault((crossed, kinds), (sum(len(some) > 1 for some in kinds), order))
    return tuple(order for _, order in sorted(found.values(), key=lambda one: one[0]))


def _members(layout: Layout, axis: str, level: float) -> float:
    """Members of a group of `axis` among `level` neighbouring ranks; they set its bandwidth (costs.collective_costs, simulator.links)."""
    return min(layout.size(axis), max(1.0, level / layout.stride(axis)))


def _levels(cluster: ClusterSpec) -> tuple[float, ...]:
    """Ranks in a fast domain, and ranks below the level where the fabric narrows."""
    pod = cluster.network.pod_nodes if cluster.network else None
    return fast_domain(as_nodes(cluster)), pod * cluster.ranks_per_node if pod else inf
