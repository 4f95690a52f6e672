"""Spans of all ranks of a job: a schedule played in the simulator, step by step, with noise and an injected fault.

Compute and messages of a pipeline come from `simulator.simulate`. Without pipeline, data-parallel ranks gather weights before
each action, as FSDP does. All ranks meet at the start of a step, at the gradient norm and at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from meshwright.diagnosis.run_spans import RankRecords
from meshwright.schedules.action import COMPUTE, FORWARD, GRADIENT, Action
from meshwright.schedules.registry import build
from meshwright.schedules.schedule import Schedule
from meshwright.simulator.durations import Durations
from meshwright.simulator.simulate import simulate
from meshwright.simulator.timing import Link, uniform_timing

PHASES = (
    "step",
    "data",
    "forward",
    "backward",
    "weight_gradient",
    "collective_wait",
    "send",
    "receive",
    "gradient_norm",
    "optimizer",
    "checkpoint",
    "validation",
    "garbage_collection",
    "clock",
    "attention_work",
)
PHASE_OF = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "weight_gradient",
}
RECORD = np.dtype(
    [
        ("start_ns", "<i8"),
        ("duration_ns", "<i8"),
        ("amount", "<i8"),
        ("step", "<u4"),
        ("action", "<i4"),
        ("stage", "<i2"),
        ("micro_batch", "<i2"),
        ("unit", "<i2"),
        ("peer", "<i2"),
        ("count", "<u2"),
        ("phase", "u1"),
    ]
)
SMALL_SECONDS = 0.002
"""Every small collective and message."""


@dataclass
class Faults:
    """Faults of the ranks in one step; a rank is (stage, dp)."""

    factor: Callable[[int, int, Action], float] = lambda stage, dp, action: 1.0
    """Of the duration of an action."""
    data: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds by rank."""
    collections: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds of a garbage collection in one action of the rank."""
    gaps: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds by rank before each action in which its host launches nothing."""
    links: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """Extra seconds of every message by (dp, sending stage, receiving stage)."""
    gather: float = 0.0
    """Extra seconds of every gather."""
    attention_work: Callable[[int, int], int] | None = None
    """By dp and micro-batch; None records none."""


@dataclass(frozen=True)
class Job:
    """A job of `pipeline` × `dp` ranks, `ranks_per_host` on a host in the order of their numbers."""

    schedule: str = "1f1b"
    pipeline: int = 1
    dp: int = 2
    micro_batches: int = 4
    noise: float = 0.015
    ranks_per_host: int = 2

    def rank(self, stage: int, dp: int) -> int:
        return stage * self.dp + dp

    @property
    def ranks(self) -> list[tuple[int, int]]:
        return [(stage, dp) for stage in range(self.pipeline) for dp in range(self.dp)]


@lru_cache
def _schedule(job: Job) -> Schedule:
    return build(job.schedule, job.pipeline, job.micro_batches)


class _Disturbed(Durations):
    """Durations of one data-parallel rank's pipeline in one step."""

    def __init__(self, job: Job, dp: int, faults: Faults, random: np.random.Generator) -> None:
        self.plan = _schedule(job)
        self.timing = uniform_timing(self.plan.stages, forward=0.1, backward_input=0.1, backward_weight=0.1)
        super().__init__(self.timing)
        self.parts: dict[Action, float] = {}
        self.extra: dict[Action, tuple[float, float]] = {}
        """By action, seconds of a gap before it and of a garbage collection in it."""
        rank_of = self.plan.rank_of
        for stage, actions in enumerate(self.plan.actions):
            compute = [part for action in actions if action.op in COMPUTE for part in action.parts]
            gap, collection = faults.gaps.get((stage, dp), 0.0), faults.collections.get((stage, dp), 0.0)
            chosen = compute[int(random.integers(len(compute)))] if collection else None
            noise = np.exp(random.normal(0.0, job.noise, len(compute))) if job.noise else np.ones(len(compute))
            for part, factor in zip(compute, noise.tolist(), strict=True):
                assert rank_of[part.stage] == stage
                self.parts[part] = super().compute(part) * factor * faults.factor(stage, dp, part)
                self.extra[part] = gap, collection if part == chosen else 0.0

    def compute(self, action: Action) -> float:
        return sum(self.parts[part] + sum(self.extra[part]) for part in action.parts)


class _Rank:
    """The records of one rank in one step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.records: list[tuple] = []

    def add(
        self, phase: str, start: float, end: float, action: Action | None = None, index: int = -1, amount: int = 0
    ) -> None:
        stage, micro_batch, peer = (action.stage, action.micro_batch, action.peer) if action else (-1, -1, -1)
        times = round(start * 1e9), round((end - start) * 1e9)
        self.records.append((*times, amount, self.step, index, stage, micro_batch, -1, peer, 1, PHASES.index(phase)))

    def add_attention_work(self, start: float, work: list[int]) -> None:
        code, at = PHASES.index("attention_work"), round(start * 1e9)
        self.records += [
            (at, 0, amount, self.step, -1, -1, number, -1, -1, 1, code) for number, amount in enumerate(work)
        ]


def play(
    job: Job, steps: int, faults: Callable[[int, np.random.Generator], Faults], seed: int = 0
) -> list[RankRecords]:
    """The spans of every rank in `steps` steps; `faults` makes those of each step."""
    random = np.random.default_rng(seed)
    records: dict[tuple[int, int], list[tuple]] = {rank: [] for rank in job.ranks}
    start = 100.0
    for step in range(1, steps + 1):
        ranks = {rank: _Rank(step) for rank in job.ranks}
        end = _play_step(job, faults(step, random), random, ranks, start)
        for rank, played in ranks.items():
            records[rank] += played.records
        start = end
    return [
        RankRecords(
            job.rank(stage, dp),
            stage,
            dp,
            f"host-{job.rank(stage, dp) // job.ranks_per_host}",
            np.array(records[stage, dp], dtype=RECORD),
            PHASES,
        )
        for stage, dp in job.ranks
    ]


def _play_step(
    job: Job, faults: Faults, random: np.random.Generator, ranks: dict[tuple[int, int], _Rank], start: float
) -> float:
    """Add the records of one step; returns its end."""
    ready = {rank: start + 0.001 + faults.data.get(rank, 0.0) for rank in ranks}
    begin = max(ready.values()) + SMALL_SECONDS
    for rank, played in ranks.items():
        played.add("data", start, ready[rank])
        played.add("collective_wait", ready[rank], begin)
        if faults.attention_work is not None:
            work = [faults.attention_work(rank[1], number) for number in range(job.micro_batches)]
            played.add_attention_work(start, work)
    if job.pipeline > 1:
        ends = {}
        for dp in range(job.dp):
            for stage, end in _play_pipeline(job, dp, faults, random, ranks, begin):
                ends[stage, dp] = end
    else:
        ends = _play_sharded(job, faults, random, ranks, begin)
    norm = max(ends.values()) + SMALL_SECONDS
    updated = {rank: norm + 0.02 * float(np.exp(random.normal(0.0, job.noise))) for rank in ranks}
    finish = max(updated.values()) + SMALL_SECONDS
    for rank, played in ranks.items():
        played.add("gradient_norm", ends[rank], norm, index=1000)
        played.add("optimizer", norm, updated[rank], index=1001)
        played.add("collective_wait", updated[rank], finish)
        played.add("step", start, finish)
    return finish


def _play_pipeline(
    job: Job, dp: int, faults: Faults, random: np.random.Generator, ranks: dict[tuple[int, int], _Rank], begin: float
) -> Iterator[tuple[int, float]]:
    """Add the records of one data-parallel rank's pipeline; yields the end of each stage's compute."""
    durations = _Disturbed(job, dp, faults, random)
    links = {
        (sender, receiver): Link(SMALL_SECONDS + extra)
        for (at, sender, receiver), extra in faults.links.items()
        if at == dp
    }
    timing = replace(durations.timing, link=Link(SMALL_SECONDS), links=links)
    timeline = simulate(durations.plan, timing, durations)
    arrivals = {
        (action.payload, action.stage, action.micro_batch): (action, end)
        for _, lane, action, _, end in timeline.records
        if lane.startswith("recv")
    }
    sends = {
        (action.payload, action.stage, action.micro_batch): action
        for _, lane, action, _, _ in timeline.records
        if lane.startswith("send")
    }
    for stage in range(job.pipeline):
        played, previous = ranks[stage, dp], begin
        compute = sorted(
            (r for r in timeline.records if r[0] == stage and r[1] == "compute" and r[2].op in COMPUTE),
            key=lambda r: r[3],
        )
        for index, (_, _, action, start, _) in enumerate(compute):
            begun = begin + start
            for key in map(_input_of, action.parts):
                if key in arrivals:
                    receive, end = arrivals[key]
                    played.add("receive", previous, max(previous, begin + end), receive, index, amount=8)
            for part in action.parts:
                gap, collection = durations.extra[part]
                begun, previous = begun + gap, begun + gap + durations.parts[part] + collection
                played.add(PHASE_OF[part.op], begun, previous, part, index)
                if collection:
                    played.add("garbage_collection", begun + 1e-6, begun + 1e-6 + collection)
                begun = previous
            for key in map(_input_of, action.parts):
                if key in sends:
                    played.add("send", previous, previous, sends[key], index, amount=8)
        yield stage, previous


def _input_of(part: Action) -> tuple[str | None, int, int]:
    """(payload, stage, micro-batch) of the message that an action needs; an action's own message has the same."""
    payload = "activation" if part.op in FORWARD else "gradient" if part.op in GRADIENT else None
    return payload, part.stage, part.micro_batch


def _play_sharded(
    job: Job, faults: Faults, random: np.random.Generator, ranks: dict[tuple[int, int], _Rank], begin: float
) -> dict[tuple[int, int], float]:
    """Add the records of ranks without pipeline: each action waits inside its span until all ranks gather its weights."""
    durations = {dp: _Disturbed(job, dp, faults, random) for dp in range(job.dp)}
    actions = [part for action in durations[0].plan.compute(0) for part in action.parts]
    ends = dict.fromkeys(ranks, begin)
    for index, part in enumerate(actions):
        starts = {rank: end + durations[rank[1]].extra[part][0] for rank, end in ends.items()}
        gathered = max(starts.values()) + SMALL_SECONDS + faults.gather
        for rank, played in ranks.items():
            collection = durations[rank[1]].extra[part][1]
            ends[rank] = gathered + durations[rank[1]].parts[part] + collection
            played.add(PHASE_OF[part.op], starts[rank], ends[rank], part, index)
            played.add("collective_wait", starts[rank], gathered, part, index)
            if collection:
                played.add("garbage_collection", gathered, gathered + collection)
    return ends
