"""Simulates the batching policy for given arrivals and a given cost of a step. Reports the times of each request.

It simulates one replica that does not overlap steps: a step begins when the results of the step before are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.policies.batch_request import EngineStep, Reason, Request, RequestPart
from meshwright.policies.batching import BatchPolicy

StepCost = Callable[[int, int, Sequence[RequestPart]], float]
"""A function (decode tokens, positions that they attend to in total, prefill chunks) that returns the seconds of a step."""
LONGEST_REPEAT = 64
"""Identical decode steps that are planned in one call, at most."""


@dataclass(slots=True)
class ServedRequest:
    """Times of one request in seconds. A time is None until the request has reached it."""

    request: Request
    first_token: float | None = None
    end: float | None = None
    new_tokens: int = 0
    reason: Reason | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first new token (TTFT)."""
        return None if self.first_token is None else self.first_token - self.request.arrival

    @property
    def time_per_token(self) -> float | None:
        """Mean seconds for each new token after the first (TPOT); None with fewer than two new tokens."""
        if self.first_token is None or self.end is None or self.new_tokens < 2:
            return None
        return (self.end - self.first_token) / (self.new_tokens - 1)


def play(
    policy: BatchPolicy[Any], requests: Iterable[Request], cost: StepCost, longest_repeat: int = LONGEST_REPEAT
) -> list[ServedRequest]:
    """Simulate all requests and return their times in order of arrival. `policy` must not have other requests."""
    arrivals = sorted(requests, key=lambda request: request.arrival)
    served = {request.number: ServedRequest(request) for request in arrivals}
    now = 0.0
    added = 0
    context = 0
    while True:
        while added < len(arrivals) and arrivals[added].arrival <= now:
            policy.add(arrivals[added])
            added += 1
        step = policy.next_step(now)
        _note_ends(policy, served, now)
        next_arrival = arrivals[added].arrival if added < len(arrivals) else float("inf")
        if step is None:
            if added == len(arrivals):
                return list(served.values())
            now = next_arrival
            continue
        context = context + step.decodes if step.unchanged else _context(step)
        deadline = policy.next_deadline
        until = next_arrival if deadline is None else min(next_arrival, deadline)
        ends = _step_ends(step, context, now, until, cost, longest_repeat)
        repeat = policy.extend(step, len(ends))
        now = ends[repeat - 1]
        context = context + step.decodes * (repeat - 1)
        for part in step.parts[step.decodes :]:
            if part.samples and served[part.request.number].first_token is None:
                served[part.request.number].first_token = now
        policy.complete(step, None)
        _note_ends(policy, served, now)


def _context(step: EngineStep) -> int:
    """Positions that the decode tokens of a step attend to, in total."""
    return sum(part.start + 1 for part in step.parts[: step.decodes])


def _step_ends(step: EngineStep, context: int, now: float, until: float, cost: StepCost, most: int) -> list[float]:
    """End times of this step and of the following identical steps that would begin before `until`; `most` at most."""
    ends = [now + cost(step.decodes, context, step.parts[step.decodes :])]
    if step.decodes == len(step.parts):
        while len(ends) < most and ends[-1] < until:
            ends.append(ends[-1] + cost(step.decodes, context + len(ends) * step.decodes, ()))
    return ends


def _note_ends(policy: BatchPolicy[Any], served: dict[int, ServedRequest], now: float) -> None:
    for ended in policy.drain_ended():
        record = served[ended.number]
        record.end = now
        record.reason = ended.reason
        record.new_tokens = ended.new_tokens
