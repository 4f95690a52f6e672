"""Compares chips for one job: the best plan on as many devices of each, its time, money and energy."""

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
    """The run on one chip; `expense` is None where there is no plan or no step time."""

    chip: str
    point: Point
    expense: Expense | None


def chips_named(text: str) -> tuple[str, ...]:
    """The chips of a list such as `H100,B200`. Raises BadInput for an unknown chip, with the nearest.

    Case and blanks do not matter:

    >>> chips_named("h100, B200")
    ('H100', 'B200')
    """
    return values_listed(text, {name: name for name in CHIPS}, "--chips")


def compare_chips(
    run: RunSpec, chips: Sequence[str], tokens: float | None = None, price: float | None = None
) -> tuple[ChipPoint, ...]:
    """The best plan for the run on as many devices of each chip, the cheapest first; those without a price by time, at the end.

    `price` is that of the cluster's own chip. Raises BadInput for clusters of unlike nodes and of ranks on a CPU.
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
    """As many devices of `chip` in hosts of its usual size; network, memory, prices and profile are those of the chip itself."""
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
    """Cheapest first, then those without a price by time, then those without a plan."""
    if point.expense is None:
        return 2, 0.0
    cost = point.expense.money_per_million_tokens
    return (0, cost) if cost is not None else (1, point.point.seconds or 0.0)
