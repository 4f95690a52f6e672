"""Pauses of requests in speculative decoding, while too few drafts are accepted to pay for a step with drafts."""

from __future__ import annotations

import heapq

TRIAL = 8
"""Steps after which the accepted drafts of a request are judged."""
FIRST_PAUSE = 32
"""Steps of a request's first pause. They double from trial to trial."""
LONGEST_PAUSE = 512
"""Steps of its longest pause."""
DRAFTED_TOKENS = 256
"""Tokens of a step with drafts at most. More take a GPU longer than reading the weights, so each draft costs time."""
GPU_STEP_COST = 0.3
CPU_STEP_COST = 1.0
"""Time that a step with drafts takes beyond one without, in steps, apart from that of a draft model.

It has more tokens, which a CPU computes more slowly, and it is planned only when the tokens of the step before are known. On an H200 it
was 0.15 with one request of a model of 1B and 0.35 with eight (`benchmarks/serve_speculation.py`); the CPU's is an estimate.
"""


class DraftPauses:
    """Selection of the requests that may get drafts in a step.

    After each trial of 8 steps, a request with fewer than `least` accepted drafts a step pauses for 32 steps. Each trial that fails
    again doubles the pause, up to 512 steps; one that does not fail ends this.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._step = 0
        self.drafting: set[int] = set()
        """Unfinished requests that do not pause."""
        self._trials: dict[int, _Trial] = {}
        self._pauses: list[tuple[int, int]] = []
        """A heap of the last step of a pause, and the request."""

    def begin(self, number: int) -> None:
        """Add a request."""
        self._trials[number] = _Trial()
        self.drafting.add(number)

    def end(self, number: int) -> None:
        """Forget a request; a number that is unknown is ignored."""
        self._trials.pop(number, None)
        self.drafting.discard(number)

    def next_step(self) -> None:
        """End the pauses that are over in the next step."""
        self._step += 1
        while self._pauses and self._pauses[0][0] < self._step:
            _, number = heapq.heappop(self._pauses)
            if number in self._trials:
                self.drafting.add(number)

    def record(self, number: int, accepted: int) -> None:
        """Note how many drafts of a request a step has accepted, 0 if it had none; a number that is unknown is ignored."""
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
    """The steps of a request since it was judged last, with their accepted drafts, and its next pause in steps."""

    __slots__ = ("accepted", "pause", "steps")

    def __init__(self) -> None:
        self.steps = self.accepted = 0
        self.pause = FIRST_PAUSE


def least_accepted(drafts: int, step_cost: float, draft_share: float) -> float:
    """Accepted drafts of a request's step from which on `drafts` drafts pay.

    `step_cost` is `GPU_STEP_COST` or `CPU_STEP_COST`; `draft_share` is the time of a draft model's step in steps of the model, 0 without a
    draft model, which computes one more token than it drafts. A step without drafts gives one token, so what is accepted must outweigh the
    additional time.
    """
    return step_cost + (drafts + 1) * draft_share


def most_drafting(drafts: int) -> int:
    """Requests of a step at most, if each may have so many drafts."""
    return max(1, DRAFTED_TOKENS // (1 + drafts))
