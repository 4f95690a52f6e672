"""Lists the orders of mesh axes that can differ in cost, because they use the levels of the network differently.

Tensor ranks are always innermost, and context ranks come next, because they communicate inside every layer. The shard, replicate and
pipeline axes are tried in every order, because it depends on their bytes which of them needs the fast links. If nodes differ, orders that
keep every stage on nodes of one type come first; then only stage boundaries connect nodes of different types (Holmes, arXiv 2312.03549).
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
from meshwright.simulator.slow_nodes import node_type_speeds, rank_speeds
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import Layout
from meshwright.spec.nodes import node_type_runs, node_types_by_rank, slowest_rank_cluster
from meshwright.spec.plan import AxisName
from meshwright.spec.run import RunSpec

OUTER: tuple[AxisName, ...] = ("pipeline", "replicate", "shard")
"""Axes whose order is searched, in the usual best order from the outermost.

A stage boundary sends the fewest bytes, a gather the most.
"""
INNER: tuple[AxisName, ...] = ("context_ring", "context_ulysses", "tensor")


def orders(cluster: ClusterSpec, sizes: Mapping[str, int]) -> list[tuple[AxisName, ...]]:
    """Return orders of all axes, outermost first. Of several orders that cross the same network levels, only the first is returned.

    `sizes` has the ranks of each axis; an axis that is left out has one rank. The product must be the cluster's ranks. Orders with every
    stage on one node type come first, and among these the orders with the pipeline outermost.
    """
    three = tuple(sizes.get(axis, 1) for axis in OUTER)
    inner = prod(sizes.get(axis, 1) for axis in INNER)
    unlike = cluster if len(node_type_runs(cluster)) > 1 else None
    return [(*outer, *INNER) for outer in _outer_orders(_levels(cluster), cluster.ranks_per_node, three, inner, unlike)]


@dataclass(frozen=True)
class HeterogeneityFactors:
    """Factors by which unlike nodes change the cost of a layout."""

    pace: float
    """Step time relative to a cluster that has only the slowest nodes, if faster pipeline ranks get more layers."""
    port: float
    """Bytes/s of a device's network port inside the slowest stage.

    If a stage has nodes of different fabrics, it is the rate of the bridge between the fabrics.
    """


def heterogeneity_factors(run: RunSpec) -> Callable[[Layout], HeterogeneityFactors] | None:
    """Return a function that gives the factors of a layout; None if all nodes are equal, or if the cost model has no rates for them."""
    cluster = run.cluster
    if len(node_type_runs(cluster)) == 1 or not (speeds := node_type_speeds(run.model, run.train, cluster)):
        return None

    def factors_of(layout: Layout) -> HeterogeneityFactors:
        slowest, _ = node_type_runs(slowest_rank_cluster(cluster, layout))[0]
        return HeterogeneityFactors(1 / fmean(rank_speeds(speeds, cluster, layout)), slowest.port)

    return factors_of


@lru_cache(maxsize=1 << 16)
def _outer_orders(
    levels: tuple[float, ...], per_node: int, three: tuple[int, ...], inner: int, unlike: ClusterSpec | None
) -> tuple[tuple[AxisName, ...], ...]:
    """Return the orders of `OUTER`, without orders that cross the same network levels as an earlier order."""
    size = dict(zip(OUTER, three, strict=True))
    distinct: dict[tuple[object, ...], tuple[int, tuple[AxisName, ...]]] = {}
    for order in permutations(OUTER):
        layout = Layout((*((axis, size[axis]) for axis in order), ("tensor", inner)), per_node)
        crossed: tuple[object, ...] = tuple(_members(layout, axis, level) for axis in OUTER for level in levels)
        node_types = node_types_by_rank(unlike, layout) if unlike else ()
        distinct.setdefault((crossed, node_types), (sum(len(stage_types) > 1 for stage_types in node_types), order))
    return tuple(order for _, order in sorted(distinct.values(), key=lambda ranked: ranked[0]))


def _members(layout: Layout, axis: str, level: float) -> float:
    """Return how many members of a group along `axis` are among `level` neighbouring ranks, for example in a fast domain.

    This number determines the bandwidth of the group; costs.collective_costs and simulator.links use it in the same way.

    With 2 tensor ranks as the innermost axis, 4 neighbouring ranks contain both tensor ranks of a group, or 2 ranks of a shard group:

    >>> from meshwright.spec.plan import BatchPlan, MeshAxis, Plan
    >>> batch = BatchPlan(global_batch=4, micro_batch=1, accumulate=1)
    >>> plan = Plan(mesh=(MeshAxis(axis="shard", size=4), MeshAxis(axis="tensor", size=2)), batch=batch)
    >>> [_members(Layout.of(plan, 8), axis, level=4) for axis in ("shard", "tensor")]
    [2.0, 2]
    """
    return min(layout.size(axis), max(1.0, level / layout.stride(axis)))


def _levels(cluster: ClusterSpec) -> tuple[float, ...]:
    """Return the sizes in ranks of the network's levels: of a fast domain, and of a pod, above which the network has less bandwidth."""
    pod = cluster.network.pod_nodes if cluster.network else None
    return fast_domain(as_nodes(cluster)), pod * cluster.ranks_per_node if pod else inf
