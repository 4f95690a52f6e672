"""Names the cause of a slowdown: splits the recorded durations into parts and replays each part alone.

The method follows "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI'25), below "the paper".

The split of compute needs no model of the job. A cell is an operation type of a model chunk on a stage. Its profile is the
median duration of each of its operations. For a rank's factor, the rank's durations are summed in each step; the median of
these sums is divided by the sum of the profile. The cell's level is the profile times the lower median of the ranks' factors,
which slow ranks do not raise if they are fewer than half. The ideal scales the levels of each type so that every stage with
operations of the type spends the same time on them, the mean over these stages. A recorded duration is then

    ideal + (level − ideal) + steady excess of a rank + excess of a rank or a micro-batch in single steps
             stage part        steady part               varying part

and the step time with one part added to the ideal is that part's contribution.
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
"""A part that adds less than this share to the ideal step time is no straggler."""
FLAGGED_JITTER = 0.1
"""Least contribution of compute times that vary without a pattern: a straggling job in the paper is 10% slower than ideal."""
SIGNIFICANT = 4.0
"""A steady excess must be this many standard errors, estimated from its variation over the steps."""
CORRELATED = 0.9
"""Correlation of forward and backward of the same micro-batch from which the paper concludes unequal sequences."""
WORK_CORRELATED = 0.7
"""Least correlation of compute time and attention work for unequal sequences; only a part of the time is proportional."""
ONE_RANK_SHARE = 0.75
"""If one rank (or host) has at least this share of the varying part's squared excesses, it is the cause, not the data."""
CHANCE = 0.125
"""A varying part belongs to one of several ranks if chance puts its slow steps on one of them less often than this."""
EQUALLY_SLOW = 0.5
"""Ranks with at least this share of the slowest rank's excess are slow together."""


@dataclass(frozen=True, slots=True)
class TimeFinding:
    """A part of the recorded durations and the time that it adds to the ideal step time."""

    cause: str
    """Cause as in docs/design/diagnosis.md.

    `host` without a stage: the ranks of a host are slow. `host` with a stage: the host thread of a rank launches late.
    """
    contribution: float
    """(step time with this part − ideal) ÷ ideal."""
    rank: int | None = None
    """None where no rank stands out by more than the variation over the steps."""
    stage: int | None = None


@dataclass(frozen=True, eq=False)
class ComputeParts:
    """The parts of the compute durations, each of shape (node, dp, step) as in `replay` and 0 for other operations."""

    ideal: np.ndarray
    stage: np.ndarray
    steady: np.ndarray
    varying: np.ndarray


def find_cause(
    measured: OperationTimes, host_of_rank: Mapping[int, str] | None = None
) -> tuple[TimeFinding | None, list[TimeFinding]]:
    """The largest finding that counts as a straggler, and all findings, the largest first."""
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
    """Split the compute durations into ideal, stage, steady and varying part."""
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
    """Indices of each cell's operations in the graph's nodes."""
    keys = np.stack((measured.graph.stages, measured.virtual_stage))[:, of_type]
    _, inverse = np.unique(keys, axis=1, return_inverse=True)
    nodes = np.flatnonzero(of_type)
    return [nodes[inverse == cell] for cell in range(inverse.max() + 1)]


class _Baseline:
    """The step without stragglers, to which single parts are added."""

    def __init__(self, measured: OperationTimes, parts: ComputeParts) -> None:
        self.measured = measured
        self.graph = measured.graph
        self.category = np.array([CATEGORY_OF[TYPES[code]] for code in measured.graph.types])
        self.work = parts.ideal + self._typical_others()
        self.seconds = replay(self.graph, self.work)

    def _typical_others(self) -> np.ndarray:
        """Typical transfers; 0 for data and garbage collection; checkpoints and validation as recorded."""
        communicates = (self.category == "communication")[:, None, None]
        others = np.where((self.category == "other")[:, None, None], self.measured.work, 0.0)
        return np.where(communicates, typical_transfers(self.measured), others)

    def contribution(self, work: np.ndarray, launch_delay: np.ndarray | None = None) -> float:
        """Increase of the step time with these durations, relative to the baseline."""
        seconds = replay(self.graph, work, launch_delay)
        return float((seconds.mean() - self.seconds.mean()) / self.seconds.mean())

    def per_rank(self, part: np.ndarray) -> np.ndarray:
        """Sum of a part over the operations of each recorded rank, (stage, dp, step)."""
        return np.stack([part[self.graph.stages == stage].sum(axis=0) for stage in range(self.measured.stage_count)])

    def worst(self, part: np.ndarray) -> tuple[int | None, int | None]:
        """(rank, stage) with the largest sum of a part; None if it does not exceed the other ranks' mean in most steps.

        Its excess must be `SIGNIFICANT` standard errors of the mean over the steps. A single rank is always named.
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
    sums = baseline.per_rank(parts.stage)[:, 0, 0]  # equal on all ranks and in all steps
    return TimeFinding("stage_imbalance", baseline.contribution(baseline.work + parts.stage), stage=int(sums.argmax()))


def _slow_rank(baseline: _Baseline, parts: ComputeParts, host_of_rank: Mapping[int, str]) -> TimeFinding:
    """A steady excess of compute of one rank, or of all ranks of a host."""
    measured = baseline.measured
    excess = baseline.per_rank(parts.steady)[..., 0]
    stage, dp = (int(index) for index in np.unravel_index(int(excess.argmax()), excess.shape))
    contribution = baseline.contribution(baseline.work + parts.steady)
    rank = int(measured.rank[stage, dp])
    varying = baseline.per_rank(parts.varying)[stage, dp]
    if len(varying) > 2:  # the median's standard error is 1.25 times the mean's
        error = 1.25 * float(varying.std(ddof=1)) / len(varying) ** 0.5
        contribution *= float(excess[stage, dp] >= SIGNIFICANT * error)
    slow = measured.rank[(excess >= EQUALLY_SLOW * excess.max()) & (excess > 0)]
    host = _common_host(slow.tolist(), measured, host_of_rank)
    if host is not None:
        return TimeFinding("host", contribution, rank=min(slow.tolist()))
    return TimeFinding("compute", contribution, rank=rank, stage=stage)


def _common_host(ranks: list[int], measured: OperationTimes, host_of_rank: Mapping[int, str]) -> str | None:
    """The host whose recorded ranks are exactly `ranks`; None for a single rank, or if all recorded ranks are on one host."""
    hosts = {host_of_rank.get(rank) for rank in ranks}
    all_hosts = {host_of_rank.get(rank) for rank in measured.rank.ravel().tolist()}
    if len(ranks) < 2 or len(hosts) > 1 or None in hosts or len(all_hosts) < 2:
        return None
    host = hosts.pop()
    on_host = [rank for rank in measured.rank.ravel().tolist() if host_of_rank.get(rank) == host]
    return host if sorted(on_host) == sorted(ranks) else None


def _varying(baseline: _Baseline, parts: ComputeParts, host_of_rank: Mapping[int, str]) -> TimeFinding:
    """Compute times that vary over micro-batches and steps: with the sequences, on one rank, or without a pattern."""
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
    """Whether chance hardly puts so large a share of the slow steps on one of `candidates`.

    `by_step` has its squared excesses. Bound: `candidates` × exp(−steps × Kullback–Leibler divergence of `share` from
    an equal share). The number of slow steps is the participation ratio (sum of the excesses)² ÷ sum of their squares.
    """
    slow_steps = float(np.sqrt(by_step).sum() ** 2 / by_step.sum())
    equal = 1.0 / candidates
    divergence = share * math.log(share / equal) if candidates > 1 else 0.0
    divergence += (1.0 - share) * math.log((1.0 - share) / (1.0 - equal)) if equal < share < 1.0 else 0.0
    return candidates * math.exp(-slow_steps * divergence) <= CHANCE


def sequences_differ(measured: OperationTimes, parts: ComputeParts) -> bool:
    """Whether forward and backward of a micro-batch deviate alike and, where attention work is recorded, with this work.

    A deviation is the mean over the model chunks, relative to the typical duration of the cell, and with several micro-batches to the
    mean of the rank's step: a rank that is slow for a whole step is no sequence.
    """
    microbatches, forward, backward = _deviations(measured, parts)
    if not microbatches or _correlation(forward, backward) < CORRELATED:
        return False
    nodes = [int(np.flatnonzero(measured.microbatch == number)[0]) for number in microbatches]
    work = measured.attention_work[nodes]
    return bool((work < 0).any()) or _correlation(_centred(work), forward + backward) >= WORK_CORRELATED


def _deviations(measured: OperationTimes, parts: ComputeParts) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The micro-batches with forward and backward, and the deviations of both, each (micro-batch, dp, step)."""
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
    """Return the differences of micro-batches (the first axis) from their mean in each step of a rank."""
    return values - values.mean(axis=0) if len(values) > 1 else values


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """The correlation coefficient; 0 if one of the arrays does not vary."""
    if min(first.std(), second.std()) <= 1e-9:
        return 0.0
    return float(np.corrcoef(first.ravel(), second.ravel())[0, 1])


def _category(baseline: _Baseline, category: str) -> TimeFinding:
    """Return the contribution of a category's recorded durations over the baseline, and the rank that adds most to it."""
    nodes = (baseline.category == category)[:, None, None]
    if not nodes.any():
        return TimeFinding(category, 0.0)
    contribution = baseline.contribution(np.where(nodes, baseline.measured.work, baseline.work))
    rank, stage = baseline.worst(np.where(nodes, baseline.measured.work - baseline.work, 0.0))
    return TimeFinding(category, contribution, rank=rank, stage=stage)


def _late_launch(baseline: _Baseline) -> TimeFinding:
    """Operations that start later after their dependencies than operations of their type usually do.

    Unlike other parts, the delays are not added to the baseline but removed from the recorded step. A message that is posted
    late may delay nothing in the recorded step, because its peer is later still, but it would delay the baseline.
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
