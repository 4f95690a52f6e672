"""Plays a run through failures in abstract time: training, checkpoints, recovery, lost and returning hosts.

It follows the same `FailureModel` as the closed form of `policies.effective_time`, event by event, and so tests it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import floor, inf
from random import Random

from meshwright.policies.effective_time import FailureClass, FailureModel


@dataclass
class _Job:
    """The run's time, its finished training in full-speed seconds, and its lost hosts."""

    random: Random
    now: float = 0.0
    trained: float = 0.0
    lacking: int = 0
    """Hosts that the present attempt trains without."""
    returns: list[float] = field(default_factory=list)
    """Times at which lost hosts are replaced, as a heap."""

    def missing(self, model: FailureModel) -> int:
        """Hosts that cannot be had now, after spares."""
        while self.returns and self.returns[0] <= self.now:
            heapq.heappop(self.returns)
        return max(0, len(self.returns) - model.spares)


def simulate_failures(model: FailureModel, failures: int = 20_000, seed: int = 0) -> float:
    """The effective training time over the first `failures` failures; the same seed gives the same result."""
    job = _Job(Random(seed))
    for _ in range(failures):
        failure = _train_until_failure(model, job)
        _recover(model, job, failure)
    return job.trained / job.now


def _train_until_failure(model: FailureModel, job: _Job) -> FailureClass:
    """Train until a failure, and count the training that its copy of the state keeps.

    When a host returns, the run restarts with it at the next checkpoint.
    """
    while True:
        speed = 1 - job.lacking / model.hosts
        segment = model.interval_seconds / speed + model.cost_seconds
        until_failure = job.random.expovariate(speed / model.mttf_seconds)
        until_growth = inf
        if job.lacking:
            return_seconds = job.returns[0] - job.now if job.missing(model) == job.lacking else 0.0
            until_growth = (floor(return_seconds / segment) + 1) * segment
        if until_failure < until_growth:
            job.now += until_failure
            failure = _draw(model, job)
            job.trained += max(0, floor((until_failure - failure.lag_seconds) / segment)) * model.interval_seconds
            return failure
        job.now += until_growth
        job.trained += round(until_growth / segment) * model.interval_seconds
        job.lacking = job.missing(model)
        job.now += model.resize_seconds


def _recover(model: FailureModel, job: _Job, failure: FailureClass) -> None:
    """Detect, wait for hosts, restart and load; a failure meanwhile begins the recovery again."""
    deadline = inf if model.wait_seconds is None else job.now
    while True:
        if failure.loses_host and model.replace_seconds:
            heapq.heappush(job.returns, job.now + job.random.expovariate(1 / model.replace_seconds))
            deadline = max(deadline, job.now + (model.wait_seconds or 0.0))
        restart = job.now + failure.detect_seconds
        missing = job.missing(model)
        if missing:
            all_return = sorted(job.returns)[-model.spares - 1]
            restart = max(restart, all_return if missing == model.hosts else min(all_return, deadline))
        ready = restart + failure.restart_seconds + failure.load_seconds
        alive = 1 - missing / model.hosts
        next_failure = job.now + job.random.expovariate(alive / model.mttf_seconds) if alive else inf
        if next_failure >= ready:
            job.now = restart
            job.lacking = job.missing(model)
            job.now = ready
            return
        job.now = next_failure
        failure = _draw(model, job)


def _draw(model: FailureModel, job: _Job) -> FailureClass:
    return job.random.choices(model.classes, [failure.share for failure in model.classes])[0]
