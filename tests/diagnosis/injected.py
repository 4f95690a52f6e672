"""Injected slowdowns: a job, what is slow in it, and the answer expected of the analysis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.schedules.action import Action
from tests.diagnosis.played import Faults, Job

CAUSES = {
    "compute",
    "communication",
    "data",
    "garbage_collection",
    "stage_imbalance",
    "sequence_imbalance",
    "host",
}
MakeFaults = Callable[[int, np.random.Generator], Faults]

SHARDED = (Job(dp=2), Job(dp=4), Job(dp=8, micro_batches=2))
PIPELINES = (
    Job("gpipe", pipeline=2, dp=2),
    Job("1f1b", pipeline=4, dp=2, micro_batches=6),
    Job("interleaved", pipeline=2, dp=4),
    Job("zb_h1", pipeline=3, dp=2, micro_batches=4),
    Job("zbv", pipeline=2, dp=2),
    Job("zb_h1", pipeline=2, dp=2),
    Job("breadth_first", pipeline=2, dp=4),
)


@dataclass(frozen=True)
class Case:
    name: str
    job: Job
    faults: MakeFaults
    cause: str
    rank: int | None = None
    stage: int | None = None

    def __str__(self) -> str:
        job = self.job
        return f"{self.name}, {job.schedule}, {job.pipeline} stages, {job.dp} data-parallel ranks"


def slow(
    chosen: Callable[[int, int], bool], factor: float, steps: Callable[[int], bool] = lambda step: True
) -> MakeFaults:
    """The chosen (stage, dp) compute `factor` times as long in some steps."""

    def faults(step: int, random: np.random.Generator) -> Faults:
        del random

        def of(stage: int, dp: int, action: Action) -> float:
            del action
            return factor if steps(step) and chosen(stage, dp) else 1.0

        return Faults(of)

    return faults


def unequal_sequences(spread: float) -> MakeFaults:
    """Forward and backward of each micro-batch of a data-parallel rank take longer or shorter, on all stages."""

    def faults(step: int, random: np.random.Generator) -> Faults:
        del step
        lengths = np.exp(random.normal(0.0, spread, (16, 64)))
        return Faults(lambda stage, dp, action: float(lengths[dp, action.micro_batch]))

    return faults


def collections(job: Job, share: float, seconds: float) -> MakeFaults:
    """Ranks collect garbage, each in its own steps."""
    return lambda step, random: Faults(collections={rank: seconds for rank in job.ranks if random.random() < share})


def cases() -> Iterator[Case]:
    for number, job in enumerate((*SHARDED, *PIPELINES)):
        stage, dp = number % job.pipeline, number % job.dp
        rank, last = job.rank(stage, dp), job.pipeline - 1

        def slow_rank(at: int, of: int, stage: int = stage, dp: int = dp) -> bool:
            return (at, of) == (stage, dp)

        for factor in (1.1, 1.5):
            yield Case(f"rank {factor - 1:.0%} slower", job, slow(slow_rank, factor), "compute", rank, stage)
        late = slow(slow_rank, 1.6, lambda step: step % 4 == 3)
        yield Case("rank slower in every fourth step", job, late, "compute", rank, stage)
        loading = {(0, dp): 0.3}
        yield Case(
            "data of a rank late", job, lambda _, r, loading=loading: Faults(data=loading), "data", job.rank(0, dp), 0
        )
        yield Case("garbage collections", job, collections(job, 0.4, 0.2), "garbage_collection")
        yield Case("unequal sequences", job, unequal_sequences(0.25), "sequence_imbalance")
        gaps = {(stage, dp): 0.03}
        yield Case("host launches late", job, lambda _, r, gaps=gaps: Faults(gaps=gaps), "host", rank, stage)
        if job.pipeline > 1:
            heavy = slow(lambda at, of, last=last: at == last, 1.3)
            yield Case("last stage 30% longer", job, heavy, "stage_imbalance", None, last)
            links = {(dp, 0, 1): 0.12, (dp, 1, 0): 0.12}
            yield Case("slow link", job, lambda _, r, links=links: Faults(links=links), "communication")
        else:
            yield Case(
                "slow gathers in some steps", job, lambda step, r: Faults(gather=0.1 * (step % 3 == 0)), "communication"
            )
        if job.dp > 2 and job.pipeline == 1:
            yield Case("slow host", job, slow(lambda at, of: of in (2, 3), 1.2), "host", 2)
