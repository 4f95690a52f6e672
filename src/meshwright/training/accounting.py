"""Comparison of measured and predicted step time and memory, once after warm-up and again at the end of a run.

A run without a predicted step time reports only at its end. The figures come from step lines that are already written;
ranks exchange two short CPU tensors, twice a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshwright.events.span import PHASES
from meshwright.observe.number_text import duration
from meshwright.observe.prediction_account import (
    COMPARED_STEPS,
    FEWEST_STEPS,
    KEPT_STEPS,
    WARM_UP,
    Account,
    TypicalStep,
    account_lines,
    compare_with_prediction,
    typical_step,
)
from meshwright.parallel.world import World
from meshwright.training.reporting import Reporter
from meshwright.training.session import Session
from meshwright.training.waiting import DataWait

Summary = Mapping[str, Any]
NOT_PREDICTED: Mapping[str, Any] = dict.fromkeys(
    ("step_seconds", "low_seconds", "high_seconds", "tokens_per_second_per_gpu", "mfu", "breakdown")
)
"""Figures of a prediction that hold for steps of `train.global_batch` only, not for those that sample their answers."""
SAMPLING = {
    "handover_seconds": "hand-over of weights",
    "rollout_seconds": "sampling",
    "rewards_seconds": "waiting for rewards",
}
"""Figures of a step with `rl` in which the trainer waits, and their names for people."""


class Accounting:
    """Passes step lines to the reporter and keeps the newest of this start, on every rank."""

    def __init__(self, session: Session, reporter: Reporter) -> None:
        self._session, self.reporter = session, reporter
        # The prediction is for steps of `train.global_batch`.
        self._cold = max(session.step, session.run.train.ramp_steps) + WARM_UP
        self._enough = self._cold + COMPARED_STEPS
        self._steps: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)
        self.waiting = DataWait(session.step + WARM_UP)

    def step(self, record: dict[str, Any]) -> None:
        """Process a finished step's line.
        The reporter is last: if it fails on one rank, all ranks have still counted the same steps."""
        self.waiting.step(record)
        if record["step"] > self._cold:
            self._steps.append(record)
        self.reporter.step(record)

    def end_step(self, step: int, timeline: Summary | None) -> None:
        """Step `step` was launched. Reports the comparison once, after the first steps behind the warm-up. Collective then."""
        predicted = self._session.plan.predicted
        if predicted is None or predicted.step_seconds is None:
            return
        if step == self._enough + 1:  # the device is a step behind
            self._compare([record for record in self._steps if record["step"] <= self._enough], timeline)

    def close(self, timeline: Summary | None) -> Account | None:
        """Report the comparison over all steps; None if there were too few. Collective, after every step was read."""
        return self._compare(list(self._steps), timeline)

    def _compare(self, records: list[dict[str, Any]], timeline: Summary | None) -> Account | None:
        predicted, measured = self._session.plan.predicted, typical_step(records)
        if predicted is None or measured is None or len(records) < FEWEST_STEPS:
            return None
        measured = over_ranks(measured, self._session.world)
        if timeline is not None and timeline["steps"][0] <= self._cold:
            timeline = None
        if self._session.rollouts is not None:
            predicted = replace(predicted, **NOT_PREDICTED)
        comparison = compare_with_prediction(predicted, measured, timeline)
        if self._session.rollouts is not None:
            comparison = replace(comparison, samples=True)
        lines = [*account_lines(comparison, str(self._session.folder)), *_sampling_line(records)]
        self.reporter.account(self._session.step, comparison, lines)
        return comparison


def _sampling_line(records: Sequence[dict[str, Any]]) -> list[str]:
    """The parts of a step that samples what it trains on: medians, of which training is what the others leave."""
    if not all("rollout_seconds" in record for record in records):
        return []
    whole, *parts = (median(record[key] for record in records) for key in ("step_seconds", *SAMPLING))
    texts = (f"{name} {duration(seconds)}" for name, seconds in zip(SAMPLING.values(), parts, strict=True))
    return [f"  {', '.join(texts)}, training {duration(whole - sum(parts))}"]


def over_ranks(rank_step: TypicalStep, world: World) -> TypicalStep:
    """`mine` with the mean phases of all ranks and the memory of the fullest rank, over the control group; collective."""
    means = torch.tensor(
        [bool(rank_step.phases), *(rank_step.phases.get(name, 0.0) for name in PHASES)], dtype=torch.float64
    )
    most = torch.tensor([rank_step.memory_bytes])
    dist.all_reduce(means, group=world.control)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=world.control)
    timed, *sums = means.tolist()
    phases = {str(name): total / timed for name, total in zip(PHASES, sums, strict=True) if total} if timed else {}
    return replace(rank_step, memory_bytes=int(most), phases=phases)
