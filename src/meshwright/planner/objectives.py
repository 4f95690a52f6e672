"""Compares plans over cluster and batch sizes: scaling with the number of GPUs, GPU-hours, and the batch with the
shortest training.
"""

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
"""Batch sizes that are tried for the shortest training, as factors of the run's batch size: 1/16 to 32."""


@dataclass(frozen=True)
class Point:
    """The best plan of a run on a number of GPUs, or why there is none."""

    gpus: int
    """Number of GPUs."""
    run: RunSpec
    """The run with the cluster of that size."""
    answer: SearchResult | None
    """The result of the search; None if there is no plan."""
    refused: str = ""
    """Why there is no plan; empty if there is one."""

    @property
    def seconds(self) -> float | None:
        """Return the step time; None if it is not known."""
        predicted = self.answer.best.plan.predicted if self.answer else None
        return predicted.step_seconds if predicted else None

    @property
    def mfu(self) -> float | None:
        """Return the model FLOPs utilisation; None if it is not known."""
        predicted = self.answer.best.plan.predicted if self.answer else None
        return predicted.mfu if predicted else None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens per second of all GPUs together, without interruptions; None if the step time is not known."""
        return self.run.train.global_batch * self.run.train.seq_len / self.seconds if self.seconds else None

    @cached_property
    def training_share(self) -> float:
        """Return the share of the time in which the run trains: without failures, restarts, checkpoints and
        evaluations.
        """
        return training_share(self.run, self.answer.best.plan) if self.answer else 1.0

    def gpu_hours(self, tokens: float) -> float | None:
        """Return the GPU-hours of a training on `tokens`, with interruptions; None if the step time is not known."""
        rate = self.tokens_per_second
        return self.gpus * tokens / (rate * self.training_share) / 3600 if rate else None


@dataclass(frozen=True)
class Training:
    """A whole training with one batch size on one cluster."""

    point: Point
    """The plan of a step."""
    steps: float
    """Number of steps."""
    seconds: float
    """Seconds of the whole training, with interruptions."""

    @property
    def batch(self) -> int:
        """Return the global batch in sequences."""
        return self.point.run.train.global_batch

    @property
    def gpu_hours(self) -> float:
        """Return the number of GPUs times the hours of the training."""
        return self.point.gpus * self.seconds / 3600


def cluster_sizes(run: RunSpec, first: int, last: int) -> tuple[int, ...]:
    """Return the sizes `first`, 2 · `first`, 4 · `first`, … up to `last`, in GPUs.

    Raises BadInput if 1 ≤ `first` ≤ `last` does not hold, if a size above one node is not a whole number of nodes, and
    for clusters that cannot be resized (`at_size`).
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
    """Return the run on `gpus` devices: on a whole number of nodes of the cluster, or on a part of one node.

    Raises BadInput for other numbers of devices, and for clusters of different nodes, of emulated nodes or of CPU
    ranks.
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
    """Return the best plan for the run on each number of GPUs, with the same global batch (strong scaling).

    `trainable` is passed to `point_of`: whether only plans count that `meshwright train` can run.
    """
    return tuple(point_of(at_size(run, gpus), trainable=trainable) for gpus in sizes)


def fastest(points: Sequence[Point]) -> Point:
    """Return the point with the shortest step. Raises OutOfResources if no point has a step time."""
    return min(_known(points), key=lambda point: point.seconds or 0.0)


def cheapest(points: Sequence[Point]) -> Point:
    """Return the point with the fewest GPU-hours per token.

    Of points within a thousandth of that, it is the one with the shortest step.

    Raises OutOfResources if no point has a step time.
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
    """Return trainings with different batch sizes, the shortest first.

    Each ends with the loss that the run reaches after `tokens` tokens.

    A batch of B tokens needs S = S_min (1 + B_crit / B) steps (McCandlish et al. 2018, arXiv 1812.06162, equation 2.11
    solved for steps). B_crit is `critical_batch_tokens`, and S_min follows from the run's own batch. `sizes` are
    numbers of GPUs, by default the size of the run's cluster. Raises OutOfResources if no batch has a plan.

    With S_min = 1,000 and B_crit = 4 · 10⁶ tokens, batches of 10⁶ and 4 · 10⁶ tokens need 5,000 and 2,000 steps:

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
    """Return the result of a search for the run, or why there is none."""
    try:
        return Point(run.cluster.ranks, run, search(run, trainable=trainable))
    except OutOfResources as error:
        return Point(run.cluster.ranks, run, None, f"does not fit: {str(error).splitlines()[0]}")
    except BadInput as error:
        return Point(run.cluster.ranks, run, None, str(error).splitlines()[0])


def _known(points: Sequence[Point]) -> list[Point]:
    """Return the points with a step time. Raises OutOfResources if there are none."""
    known = [point for point in points if point.seconds]
    if known:
        return known
    refusals = "; ".join(
        f"{point.gpus} GPUs: {point.refused or 'the rates of the chip are unknown'}" for point in points[:3]
    )
    raise OutOfResources(f"no requested cluster size has a plan with a known step time ({refusals})")
