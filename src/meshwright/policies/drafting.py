"""Speculative decoding: pauses of requests that have too few accepted drafts to make up for the cost of a step with drafts."""

from __future__ import annotations

import heapq

TRIAL = 8
"""Steps in a trial. After a trial, the accepted drafts of a request are compared with the least number."""
FIRST_PAUSE = 32
"""Steps of a request's first pause. The pause doubles each time that the next trial fails too."""
LONGEST_PAUSE = 512
"""Steps of the longest pause."""
DRAFTED_TOKENS = 256
"""Tokens in a step with drafts, at most. With more, a GPU computes longer than it reads weights, so each draft costs time."""
GPU_STEP_COST = 0.3
"""Additional time of a step with drafts on a GPU, as a fraction of a step without drafts. The time of a draft model is not included.

A step with drafts has more tokens, and it can only be planned when the tokens of the step before are known. On an H200 the cost was 0.15
with one request of a model of 1B parameters, and 0.35 with eight requests (`benchmarks/serve_speculation.py`).
"""
CPU_STEP_COST = 1.0
"""The same for a CPU, which computes additional tokens more slowly. This is an estimate."""


class DraftPauses:
    """Selects the requests that may get drafts in a step.

    A trial has 8 steps. If fewer than `least` drafts per step were accepted, the request gets no drafts for 32 steps. Each further trial
    that fails doubles the pause, up to 512 steps. After a trial that does not fail, the next pause is 32 steps again.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._step = 0
        self.drafting: set[int] = set()
        """Unfinished requests that do not pause."""
        self._trials: dict[int, _Trial] = {}
        self._pauses: list[tuple[int, int]] = []
        """A heap of (last step of the pause, number of the request)."""

    def begin(self, number: int) -> None:
        """Add a request."""
        self._trials[number] = _Trial()
        self.drafting.add(number)

    def end(self, number: int) -> None:
        """Forget a request. An unknown number is ignored."""
        self._trials.pop(number, None)
        self.drafting.discard(number)

    def next_step(self) -> None:
        """Begin the next step, and end the pauses that are over."""
        self._step += 1
        while self._pauses and self._pauses[0][0] < self._step:
            _, number = heapq.heappop(self._pauses)
            if number in self._trials:
                self.drafting.add(number)

    def record(self, number: int, accepted: int) -> None:
        """Record how many drafts of a request a step accepted; 0 if it had none. An unknown number is ignored."""
        trial = self._trials.get(number)
        if trial is None:
            return
        trial.steps += 1
        trial.accepted += accepted
        if trial.steps < TRIAL:
            return
        if trial.accepted < self._least * TRIAL:
            self.drafting.discard(number)
            heapq.heappush(self._pauses, (self._step + trial.pause, number))
            trial.pause = min(2 * trial.pause, LONGEST_PAUSE)
        else:
            trial.pause = FIRST_PAUSE
        trial.steps = trial.accepted = 0


class _Trial:
    """Steps and accepted drafts of a request in its current trial, and the length of its next pause in steps."""

    __slots__ = ("accepted", "pause", "steps")

    def __init__(self) -> None:
        self.steps = self.accepted = 0
        self.pause = FIRST_PAUSE


def least_accepted(drafts: int, step_cost: float, draft_share: float) -> float:
    """Accepted drafts per step that a request needs so that `drafts` drafts per step save time.

    `step_cost` is `GPU_STEP_COST` or `CPU_STEP_COST`. `draft_share` is the time of one step of the draft model as a fraction of a step of
    the model; 0 without a draft model. A draft model computes `drafts` + 1 tokens. A step without drafts gives one token, so the accepted
    drafts must make up for the additional time. Example: cost 0.3, 4 drafts and a share of 0.1 need 0.3 + 5 · 0.1 = 0.8 accepted drafts per
    step.
    """
    return step_cost + (drafts + 1) * draft_share


def most_drafting(drafts: int) -> int:
    """How many requests of a step may have drafts, if each may have `drafts` of them."""
    return max(1, DRAFTED_TOKENS // (1 + drafts))
