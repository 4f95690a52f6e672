"""Compares chips for one job: for each chip, the best plan on the same number of devices, with its time, money and
energy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.planner.money import Expense, expense
from meshwright.planner.objectives import Point, point_of
from meshwright.spec.chips import CHIPS
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.named_values import values_listed
from meshwright.spec.run import RunSpec


@dataclass(frozen=True)
class ChipPoint:
    """The best plan of the run on one chip."""

    chip: str
    point: Point
    """The run on this chip, with its plan and step time if there is one."""
    expense: Expense | None
    """Money and energy; None if there is no plan or its step time is not known."""


def chips_named(text: str) -> tuple[str, ...]:
    """Return the chips of a list such as `H100,B200`. Raises BadInput for an unknown chip, with the nearest name.

    Case and blanks do not matter:

    >>> chips_named("h100, B200")
    ('H100', 'B200')
    """
    return values_listed(text, {name: name for name in CHIPS}, "--chips")


def compare_chips(
    run: RunSpec, chips: Sequence[str], tokens: float | None = None, price: float | None = None
) -> tuple[ChipPoint, ...]:
    """Return the best plan for the run on the same number of devices of each chip.

    The cheapest chip comes first. After the chips with a price come those without one, in order of step time, and then
    those without a plan. `tokens` is the number of tokens of the whole training. `price` is the price per device and
    hour of the cluster's own chip. Raises BadInput if the cluster has different nodes, emulated nodes or CPU ranks.
    """
    if run.cluster.groups or run.cluster.emulate_nodes > 1 or run.cluster.is_cpu:
        raise BadInput("--chips compares clusters of like GPUs; leave out cluster.groups, emulate_nodes and cpu")
    points = []
    for chip in chips:
        sized = replace(run, cluster=cluster_with(run.cluster, chip))
        point = point_of(sized)
        own_price = price if chip == run.cluster.gpu else None
        found = expense(point.run, point.answer.best.plan, tokens, own_price) if point.answer else None
        points.append(ChipPoint(chip, point, found))
    return tuple(sorted(points, key=_order))


def cluster_with(cluster: ClusterSpec, chip: str) -> ClusterSpec:
    """Return a cluster with the same number of devices of type `chip`, in hosts of the chip's usual size.

    Network, memory, price and profile are the chip's own. Raises BadInput if the number of devices is not a multiple of
    the devices of a host.
    """
    if chip == cluster.gpu:
        return cluster
    per_node = min(CHIPS[chip].per_node, cluster.ranks)
    if cluster.ranks % per_node:
        raise BadInput(
            f"--chips {chip}: hosts have {per_node} devices, which does not divide the cluster's {cluster.ranks}"
        )
    return replace(
        cluster,
        gpu=chip,
        nodes=cluster.ranks // per_node,
        gpus_per_node=per_node,
        memory_gib=None,
        network=None,
        profile=None,
        price_per_gpu_hour=None,
        watts_per_gpu=None,
    )


def _order(point: ChipPoint) -> tuple[int, float]:
    """Return the sort key: first by price, then chips without a price by step time, then chips without a plan."""
    if point.expense is None:
        return 2, 0.0
    cost = point.expense.money_per_million_tokens
    return (0, cost) if cost is not None else (1, point.point.seconds or 0.0)
