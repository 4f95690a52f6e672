"""Names the cause of a slowdown. Recorded durations are split into parts, and the step is replayed with each part alone.

The method follows "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25), called "the paper" below.

The split of compute durations needs no model of the job:

1. A cell is all operations of one type and one model chunk on one stage. The profile of a cell has the median duration of each operation.
2. A rank's factor says how fast it is. Its durations in the cell are summed for each step; the median of these sums is divided by the sum
of the
   profile.
3. The level of a cell is its profile times the lower median of its ranks' factors. Slow ranks do not raise it if they are fewer than half.
4. The ideal scales the levels of a type so that every stage with this type spends the same time on it: the mean over these stages.

A recorded duration is then a sum:

    ideal + (level − ideal) + steady excess of a rank + excess of a rank or a micro-batch in single steps
             stage part        steady part               varying part

The contribution of a part is the time by which the step gets longer if this part alone is added to the ideal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.diagnosis.operations import CATEGORY_OF, CODE_OF, MODEL_COMPUTE_TYPES, P2P_TYPES, TYPES
from meshwright.diagnosis.replay import OperationTimes, replay
from meshwright.diagnosis.what_if import typical_transfers

FLAGGED_CONTRIBUTION = 0.02
"""A part whose contribution is less than this share of the ideal step time is not called a straggler."""
FLAGGED_JITTER = 0.1
"""Least contribution to report compute times that vary without a pattern. In the paper, a straggling job is 10% slower than ideal."""
SIGNIFICANT = 4.0
"""A steady excess counts if it is at least this many standard errors, estimated from its variation over the steps."""
CORRELATED = 0.9
"""If forward and backward times of micro-batches correlate at least this much, the paper concludes that sequences differ."""
WORK_CORRELATED = 0.7
"""Least correlation of compute time with attention work for unequal sequences. It is lower, as only a part of the time is proportional."""
ONE_RANK_SHARE = 0.75
"""If one rank (or host) has at least this share of the squared excesses of the varying part, the rank is the cause, not the data."""
CHANCE = 0.125
"""One of several ranks is named as the cause of a varying part if chance would concentrate slow steps on one rank less often than this."""
EQUALLY_SLOW = 0.5
"""Ranks with at least this share of the slowest rank's excess are counted as slow too."""


@dataclass(frozen=True, slots=True)
class TimeFinding:
    """A part of the recorded durations, and its contribution to the step time."""

    cause: str
    """One of the causes in docs/design/diagnosis.md.

    `host` without a stage means that all ranks of a host are slow. `host` with a stage means that a rank's host thread launches late.
    """
    contribution: float
    """(step time with this part − ideal step time) ÷ ideal step time."""
    rank: int | None = None
    """None if no rank is slower than others by more than the variation over the steps."""
    stage: int | None = None


@dataclass(frozen=True, eq=False)
class ComputeParts:
    """The parts of compute durations, each of shape (node, dp, step) as in `replay`. They are 0 for other operations."""

    ideal: np.ndarray
    stage: np.ndarray
    steady: np.ndarray
    varying: np.ndarray


def find_cause(
    measured: OperationTimes, host_of_rank: Mapping[int, str] | None = None
) -> tuple[TimeFinding | None, list[TimeFinding]]:
    """The largest finding that counts as a straggler (None if there is none), and all findings, the largest first."""
    parts = split_compute(measured)
    baseline = _Baseline(measured, parts)
    findings = [
        _stage_imbalance(baseline, parts),
        _slow_rank(baseline, parts, host_of_rank or {}),
        _varying(baseline, parts, host_of_rank or {}),
        _category(baseline, "communication"),
        _category(baseline, "data"),
        _category(baseline, "garbage_collection"),
        _late_launch(baseline),
    ]
    findings.sort(key=lambda finding: -finding.contribution)
    flagged = next((finding for finding in findings if finding.contribution >= FLAGGED_CONTRIBUTION), None)
    return flagged, findings


def split_compute(measured: OperationTimes) -> ComputeParts:
    """Split compute durations into the ideal, stage, steady and varying parts. See the module's docstring."""
    work = measured.work
    stages = measured.graph.stages
    parts = ComputeParts(*(np.zeros_like(work) for _ in range(4)))
    for code in np.unique(measured.graph.types):
        if CATEGORY_OF[TYPES[code]] != "compute":
            continue
        of_type = measured.graph.types == code
        level = np.zeros(len(work))
        for cell in _cells(measured, of_type):
            profile = np.median(work[cell], axis=(1, 2))
            factors = np.median(work[cell].sum(axis=0), axis=1) / (profile.sum() or 1.0)
            usual = np.sort(factors)[(len(factors) - 1) // 2]
            level[cell] = profile * usual
            parts.steady[cell] = profile[:, None, None] * (factors - usual)[None, :, None]
            parts.varying[cell] = work[cell] - profile[:, None, None] * factors[None, :, None]
        sums = np.bincount(stages[of_type], weights=level[of_type], minlength=measured.stage_count)
        with_type = np.bincount(stages[of_type], minlength=measured.stage_count) > 0
        ideal = level * sums[with_type].mean() / np.where(sums > 0, sums, 1.0)[stages]
        parts.ideal[of_type] = ideal[of_type, None, None]
        parts.stage[of_type] = (level - ideal)[of_type, None, None]
    return parts


def _cells(measured: OperationTimes, of_type: np.ndarray) -> list[np.ndarray]:
    """For each cell, the indices of its operations among the graph's nodes."""
    keys = np.stack((measured.graph.stages, measured.virtual_stage))[:, of_type]
    _, inverse = np.unique(keys, axis=1, return_inverse=True)
    nodes = np.flatnonzero(of_type)
    return [nodes[inverse == cell] for cell in range(inverse.max() + 1)]


class _Baseline:
    """The ideal step, to which single parts are added."""

    def __init__(self, measured: OperationTimes, parts: ComputeParts) -> None:
        self.measured = measured
        self.graph = measured.graph
        self.category = np.array([CATEGORY_OF[TYPES[code]] for code in measured.graph.types])
        self.work = parts.ideal + self._typical_others()
        self.seconds = replay(self.graph, self.work)

    def _typical_others(self) -> np.ndarray:
        """Durations of operations other than compute: typical for transfers, 0 for data and garbage collection, else as recorded."""
        communicates = (self.category == "communication")[:, None, None]
        others = np.where((self.category == "other")[:, None, None], self.measured.work, 0.0)
        return np.where(communicates, typical_transfers(self.measured), others)

    def contribution(self, work: np.ndarray, launch_delay: np.ndarray | None = None) -> float:
        """How much longer the step takes with these durations than the baseline, relative to the baseline."""
        seconds = replay(self.graph, work, launch_delay)
        return float((seconds.mean() - self.seconds.mean()) / self.seconds.mean())

    def per_rank(self, part: np.ndarray) -> np.ndarray:
        """The sum of a part over the operations of each recorded rank, (stage, dp, step)."""
        return np.stack([part[self.graph.stages == stage].sum(axis=0) for stage in range(self.measured.stage_count)])

    def worst(self, part: np.ndarray) -> tuple[int | None, int | None]:
        """(rank, stage) with the largest sum of a part.

        Returns (None, None) if it does not clearly exceed the mean of the other ranks: by at least `SIGNIFICANT` standard errors of the
        mean over the steps. If only one rank was recorded, it is always returned.
        """
        by_step = self.per_rank(part)
        sums = by_step.sum(axis=2)
        stage, dp = (int(index) for index in np.unravel_index(int(sums.argmax()), sums.shape))
        if sums.size > 1:
            excess = by_step[stage, dp] - (by_step.sum(axis=(0, 1)) - by_step[stage, dp]) / (sums.size - 1)
            if len(excess) > 2 and excess.mean() < SIGNIFICANT * excess.std(ddof=1) / len(excess) ** 0.5:
                return None, None
        return int(self.measured.rank[stage, dp]), stage


def _stage_imbalance(baseline: _Baseline, parts: ComputeParts) -> TimeFinding:
    """The contribution of stages with unequal work, and the stage that has the most."""
    sums = baseline.per_rank(parts.stage)[:, 0, 0]  # equal on all ranks and in all steps
    return TimeFinding("stage_imbalance", baseline.contribution(baseline.work + parts.stage), stage=int(sums.argmax()))


def _slow_rank(baseline: _Baseline, parts: ComputeParts, host_of_rank: Mapping[int, str]) -> TimeFinding:
    """The steady excess of compute of one rank, or of all ranks of a host."""
    measured = baseline.measured
    excess = baseline.per_rank(parts.steady)[..., 0]
    stage, dp = (int(index) for index in np.unravel_index(int(excess.argmax()), excess.shape))
    contribution = baseline.contribution(baseline.work + parts.steady)
    rank = int(measured.rank[stage, dp])
    varying = baseline.per_rank(parts.varying)[stage, dp]
    if len(varying) > 2:  # the standard error of a median is 1.25 times that of a mean
        error = 1.25 * float(varying.std(ddof=1)) / len(varying) ** 0.5
        contribution *= float(excess[stage, dp] >= SIGNIFICANT * error)
    slow = measured.rank[(excess >= EQUALLY_SLOW * excess.max()) & (excess > 0)]
    host = _common_host(slow.tolist(), measured, host_of_rank)
    if host is not None:
        return TimeFinding("host", contribution, rank=min(slow.tolist()))
    return TimeFinding("compute", contribution, rank=rank, stage=stage)


def _common_host(ranks: list[int], measured: OperationTimes, host_of_rank: Mapping[int, str]) -> str | None:
    """The host whose recorded ranks are exactly `ranks`; None for a single rank, and if all recorded ranks are on one host."""
    hosts = {host_of_rank.get(rank) for rank in ranks}
    all_hosts = {host_of_rank.get(rank) for rank in measured.rank.ravel().tolist()}
    if len(ranks) < 2 or len(hosts) > 1 or None in hosts or len(all_hosts) < 2:
        return None
    host = hosts.pop()
    on_host = [rank for rank in measured.rank.ravel().tolist() if host_of_rank.get(rank) == host]
    return host if sorted(on_host) == sorted(ranks) else None


def _varying(baseline: _Baseline, parts: ComputeParts, host_of_rank: Mapping[int, str]) -> TimeFinding:
    """Compute times that vary over micro-batches and steps. The cause is one rank, one host, unequal sequences, or unknown."""
    measured = baseline.measured
    contribution = baseline.contribution(baseline.work + parts.varying)
    positive = np.maximum(parts.varying, 0.0) ** 2
    by_step = baseline.per_rank(positive)
    squares = by_step.sum(axis=2)
    stage, dp = (int(index) for index in np.unravel_index(int(squares.argmax()), squares.shape))
    total = float(squares.sum())
    rank = int(measured.rank[stage, dp])
    share = float(squares[stage, dp]) / (total or 1.0)
    if share >= ONE_RANK_SHARE and _is_no_chance(by_step[stage, dp], share, squares.size):
        return TimeFinding("compute", contribution, rank=rank, stage=stage)
    hosts = set(host_of_rank.values())
    for host in hosts:
        on_host = np.vectorize(lambda number, host=host: host_of_rank.get(number) == host)(measured.rank)
        share = float(squares[on_host].sum()) / (total or 1.0)
        several = 1 < on_host.sum() < on_host.size and share >= ONE_RANK_SHARE
        if several and _is_no_chance(by_step[on_host].sum(axis=0), share, len(hosts)):
            return TimeFinding("host", contribution, rank=int(measured.rank[on_host].min()))
    if sequences_differ(measured, parts):
        return TimeFinding("sequence_imbalance", contribution)
    return TimeFinding("compute", contribution if contribution >= FLAGGED_JITTER else 0.0)


def _is_no_chance(by_step: np.ndarray, share: float, candidates: int) -> bool:
    """Whether chance would rarely concentrate so large a share of the slow steps on one of `candidates`.

    `by_step` has the squared excesses of the one candidate in each step. The number of slow steps is estimated as the participation ratio:
    (sum of excesses)² ÷ sum of their squares. The probability is at most `candidates` · exp(−slow steps · D), where D is the
    Kullback–Leibler divergence of `share` from an equal share.
    """
    slow_steps = float(np.sqrt(by_step).sum() ** 2 / by_step.sum())
    equal = 1.0 / candidates
    divergence = share * math.log(share / equal) if candidates > 1 else 0.0
    divergence += (1.0 - share) * math.log((1.0 - share) / (1.0 - equal)) if equal < share < 1.0 else 0.0
    return candidates * math.exp(-slow_steps * divergence) <= CHANCE


def sequences_differ(measured: OperationTimes, parts: ComputeParts) -> bool:
    """Whether forward and backward of micro-batches deviate together and, if attention work was recorded, also with this work.

    The deviation of a micro-batch is the mean over model chunks, relative to the typical duration of each cell. If there are several
    micro-batches, the mean of the rank's step is subtracted: if a rank is slow for a whole step, its sequences are not the reason.
    """
    microbatches, forward, backward = _deviations(measured, parts)
    if not microbatches or _correlation(forward, backward) < CORRELATED:
        return False
    nodes = [int(np.flatnonzero(measured.microbatch == number)[0]) for number in microbatches]
    work = measured.attention_work[nodes]
    return bool((work < 0).any()) or _correlation(_centred(work), forward + backward) >= WORK_CORRELATED


def _deviations(measured: OperationTimes, parts: ComputeParts) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The micro-batches that have forward and backward, and the deviations of both, each (micro-batch, dp, step)."""
    deviations: dict[str, dict[int, list[np.ndarray]]] = {name: {} for name in MODEL_COMPUTE_TYPES}
    typical = parts.ideal + parts.stage + parts.steady
    for index, node in enumerate(measured.graph.nodes):
        name = TYPES[node.type]
        microbatch = int(measured.microbatch[index])
        if name in deviations and microbatch >= 0:
            relative = parts.varying[index] / np.maximum(typical[index], 1e-12)
            deviations[name].setdefault(microbatch, []).append(relative)
    forward = deviations["forward-compute"]
    backward = deviations["backward-compute"]
    both = sorted(set(forward) & set(backward))
    if not both:
        return both, np.zeros(0), np.zeros(0)
    first, second = (
        _centred(np.stack([np.mean(by_microbatch[key], axis=0) for key in both]))
        for by_microbatch in (forward, backward)
    )
    return both, first, second


def _centred(values: np.ndarray) -> np.ndarray:
    """Subtract the mean over micro-batches (the first axis) from each step of a rank. A single micro-batch is returned as it is."""
    return values - values.mean(axis=0) if len(values) > 1 else values


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """The correlation coefficient; 0 if one of the arrays is constant."""
    if min(first.std(), second.std()) <= 1e-9:
        return 0.0
    return float(np.corrcoef(first.ravel(), second.ravel())[0, 1])


def _category(baseline: _Baseline, category: str) -> TimeFinding:
    """The contribution of a category's recorded durations to the step time, and the rank that has most of it."""
    nodes = (baseline.category == category)[:, None, None]
    if not nodes.any():
        return TimeFinding(category, 0.0)
    contribution = baseline.contribution(np.where(nodes, baseline.measured.work, baseline.work))
    rank, stage = baseline.worst(np.where(nodes, baseline.measured.work - baseline.work, 0.0))
    return TimeFinding(category, contribution, rank=rank, stage=stage)


def _late_launch(baseline: _Baseline) -> TimeFinding:
    """The contribution of operations that start later after their dependencies than is usual for their type.

    Other parts are added to the baseline; these delays are instead removed from the recorded step. A message that is posted late may delay
    nothing in the recorded step because its peer is even later, but it would delay the baseline.
    """
    measured = baseline.measured
    delay = measured.launch_delay
    usual = delay.copy()
    for code in np.unique(baseline.graph.types):
        nodes = baseline.graph.types == code
        usual[nodes] = np.minimum(delay[nodes], np.median(delay[nodes]))
    recorded, faster = (replay(baseline.graph, measured.work, values).mean() for values in (delay, usual))
    messages = np.isin(baseline.graph.types, [CODE_OF[name] for name in P2P_TYPES])[:, None, None]
    rank, stage = baseline.worst(np.where(messages, 0.0, delay - usual))
    return TimeFinding("host", float((recorded - faster) / baseline.seconds.mean()), rank=rank, stage=stage)
