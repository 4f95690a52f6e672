"""Compares plans over cluster and batch sizes: scaling with GPUs, GPU hours, and the batch with the shortest training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.planner.candidate import SearchResult
from meshwright.planner.money import training_share
from meshwright.planner.search import search
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.run import RunSpec

BATCHES = tuple(2.0**power for power in range(-4, 6))
"""Batch sizes that are tried for the shortest training, relative to the run's."""


@dataclass(frozen=True)
class Point:
    """The run on a number of GPUs: the answer of a search, or why there is none."""

    gpus: int
    run: RunSpec
    answer: SearchResult | None
    refused: str = ""

    @property
    def seconds(self) -> float | None:
        predicted = self.answer.best.plan.predicted if self.answer else None
        return predicted.step_seconds if predicted else None

    @property
    def mfu(self) -> float | None:
        predicted = self.answer.best.plan.predicted if self.answer else None
        return predicted.mfu if predicted else None

    @property
    def tokens_per_second(self) -> float | None:
        return self.run.train.global_batch * self.run.train.seq_len / self.seconds if self.seconds else None

    @cached_property
    def training_share(self) -> float:
        """Share of the time in which the run trains: after failures, restarts, checkpoints and validations."""
        return training_share(self.run, self.answer.best.plan) if self.answer else 1.0

    def gpu_hours(self, tokens: float) -> float | None:
        """GPU hours of training on `tokens`, with interruptions; None where the step time is not known."""
        rate = self.tokens_per_second
        return self.gpus * tokens / (rate * self.training_share) / 3600 if rate else None


@dataclass(frozen=True)
class Training:
    """A whole training with one batch size: the number of steps that it needs, on one cluster."""

    point: Point
    steps: float
    seconds: float

    @property
    def batch(self) -> int:
        return self.point.run.train.global_batch

    @property
    def gpu_hours(self) -> float:
        return self.point.gpus * self.seconds / 3600


def cluster_sizes(run: RunSpec, first: int, last: int) -> tuple[int, ...]:
    """`first` GPUs, then doubled up to `last`.

    Raises BadInput for an empty range, a size above one node that is not whole nodes, and clusters of unlike nodes.
    """
    if not 1 <= first <= last:
        raise BadInput(f"--gpus {first}..{last}: expected A..B with 1 ≤ A ≤ B, such as --gpus 8..1024")
    sizes = [first]
    while 2 * sizes[-1] <= last:
        sizes.append(2 * sizes[-1])
    for gpus in sizes:
        at_size(run, gpus)
    return tuple(sizes)


def at_size(run: RunSpec, gpus: int) -> RunSpec:
    """The run on `gpus` devices: whole nodes of the cluster's size, or a part of one node.

    Raises BadInput for other numbers of devices and for clusters that cannot be resized.
    """
    cluster = run.cluster
    if cluster.is_cpu or cluster.groups or cluster.emulate_nodes > 1:
        cluster_type = "unlike nodes (cluster.groups)" if cluster.groups else "emulated nodes"
        cluster_type = "ranks on a CPU" if cluster.is_cpu else cluster_type
        raise BadInput(
            f"--gpus needs a cluster of like GPUs, and this cluster has {cluster_type}; leave --gpus out, or set cluster.gpu=H100"
        )
    nodes, odd = divmod(gpus, cluster.gpus_per_node)
    if nodes and odd:
        near = nodes * cluster.gpus_per_node
        raise BadInput(
            f"--gpus {gpus}: nodes have {cluster.gpus_per_node} GPUs; the nearest whole number of nodes is {near} GPUs"
        )
    sized = replace(cluster, nodes=nodes or 1, gpus_per_node=cluster.gpus_per_node if nodes else gpus)
    return replace(run, cluster=sized)


def scaling(run: RunSpec, sizes: Sequence[int], *, trainable: bool = True) -> tuple[Point, ...]:
    """The best plan for the run on each number of GPUs, with the same global batch (strong scaling)."""
    return tuple(point_of(at_size(run, gpus), trainable=trainable) for gpus in sizes)


def fastest(points: Sequence[Point]) -> Point:
    """The point with the shortest step. Raises OutOfResources when no point has a step time."""
    return min(_known(points), key=lambda point: point.seconds or 0.0)


def cheapest(points: Sequence[Point]) -> Point:
    """The point with the fewest GPU hours per token; the faster of points that cost the same within a thousandth.

    Raises OutOfResources when no point has a plan.
    """
    known = _known(points)
    least = min(point.gpu_hours(1.0) or 0.0 for point in known)
    return fastest([point for point in known if (point.gpu_hours(1.0) or 0.0) <= 1.001 * least])


def shortest_training(
    run: RunSpec,
    critical_batch_tokens: float,
    tokens: float,
    sizes: Sequence[int] | None = None,
    *,
    trainable: bool = True,
) -> tuple[Training, ...]:
    """Trainings with different batch sizes to the loss that the run reaches after `tokens`, the shortest first.

    A batch of B tokens needs S = S_min (1 + B_crit / B) steps (McCandlish et al. 2018, arXiv 1812.06162, equation 2.11 solved for steps);
    S_min follows from the run's batch. `sizes` are numbers of GPUs; without them the run's cluster is used.
    Raises OutOfResources when no batch has a plan.

    With S_min = 1,000 and B_crit = 4 · 10⁶ tokens, batches of 10⁶ and 4 · 10⁶ tokens take 5,000 and 2,000 steps:

    >>> [round(1_000 * (1 + 4e6 / batch)) for batch in (1e6, 4e6)]
    [5000, 2000]
    """
    own_tokens = run.train.global_batch * run.train.seq_len
    least_steps = tokens / own_tokens / (1 + critical_batch_tokens / own_tokens)
    trainings: list[Training] = []
    points: list[Point] = []
    for batch in sorted({round(run.train.global_batch * factor) for factor in BATCHES} - {0}):
        sized = replace(run, train=replace(run.train, global_batch=batch))
        steps = least_steps * (1 + critical_batch_tokens / (batch * run.train.seq_len))
        sized_points = scaling(sized, sizes, trainable=trainable) if sizes else (point_of(sized, trainable=trainable),)
        points += sized_points
        trainings += [
            Training(point, steps, steps * point.seconds / point.training_share)
            for point in sized_points
            if point.seconds
        ]
    _known(points)
    return tuple(sorted(trainings, key=lambda training: training.seconds))


def point_of(run: RunSpec, *, trainable: bool = True) -> Point:
    """The answer of a search for the run, or why there is none."""
    try:
        return Point(run.cluster.ranks, run, search(run, trainable=trainable))
    except OutOfResources as error:
        return Point(run.cluster.ranks, run, None, f"does not fit: {str(error).splitlines()[0]}")
    except BadInput as error:
        return Point(run.cluster.ranks, run, None, str(error).splitlines()[0])


def _known(points: Sequence[Point]) -> list[Point]:
    known = [point for point in points if point.seconds]
    if known:
        return known
    refusals = "; ".join(
        f"{point.gpus} GPUs: {point.refused or 'the rates of the chip are unknown'}" for point in points[:3]
    )
    raise OutOfResources(f"no requested cluster size has a plan with a known step time ({refusals})")
