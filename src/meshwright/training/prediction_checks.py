"""Comparison of measured and predicted step time and memory: once after warm-up, and again at the end of a run.

A run without a predicted step time reports only at its end. The figures come from step records that are already written. For each
comparison the ranks exchange two short CPU tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from meshwright.events.span import PHASES
from meshwright.observe.prediction_check import (
    COMPARED_STEPS,
    FEWEST_STEPS,
    KEPT_STEPS,
    WARM_UP,
    CheckPart,
    Comparison,
    PredictionCheck,
    TypicalStep,
    check_lines,
    compare_with_prediction,
    typical_step,
)
from meshwright.parallel.world import World
from meshwright.planner.rollout_time import rl_seconds
from meshwright.spec.errors import BadInput
from meshwright.training.reporting import Reporter
from meshwright.training.session import TrainingSession
from meshwright.training.waiting import DataWait

Summary = Mapping[str, Any]
PARTS = {
    "handover_seconds": ("hand-over of weights", "handover"),
    "rollout_seconds": ("sampling", "rollout"),
    "rewards_seconds": ("waiting for rewards", None),
}
"""In a step with `rl`, the figures of phases in which the trainer waits: each with its name for people and its name in the prediction.

The rest of the step is training.
"""


class PredictionChecks:
    """Passes step records to the reporter, and keeps the newest records of this start, on every rank."""

    def __init__(self, session: TrainingSession, reporter: Reporter) -> None:
        self._session = session
        self.reporter = reporter
        # Steps of the batch ramp are left out, because the prediction is for steps of `train.global_batch`.
        self._cold = max(session.step, session.run.train.ramp_steps) + WARM_UP
        self._enough = self._cold + COMPARED_STEPS
        self._steps: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)
        self.waiting = DataWait(session.step + WARM_UP)

    def step(self, record: dict[str, Any]) -> None:
        """Process the record of a finished step.

        The reporter comes last: if it fails on one rank, all ranks have still counted the same steps.
        """
        self.waiting.step(record)
        if record["step"] > self._cold:
            self._steps.append(record)
        self.reporter.step(record)

    def end_step(self, step: int, timeline: Summary | None) -> None:
        """Call it when `step` was launched. Reports the comparison once, when enough steps follow the warm-up; this is collective."""
        predicted = self._session.plan.predicted
        if predicted is None or predicted.step_seconds is None:
            return
        if step == self._enough + 1:  # the device is a step behind
            self._compare([record for record in self._steps if record["step"] <= self._enough], timeline)

    def close(self, timeline: Summary | None) -> PredictionCheck | None:
        """Report the comparison over all kept steps; returns None if there were too few. Collective; call it after every step was read."""
        return self._compare(list(self._steps), timeline)

    def _compare(self, records: list[dict[str, Any]], timeline: Summary | None) -> PredictionCheck | None:
        predicted = self._session.plan.predicted
        measured = typical_step(records)
        if predicted is None or measured is None or len(records) < FEWEST_STEPS:
            return None
        measured = over_ranks(measured, self._session.world)
        if timeline is not None and timeline["steps"][0] <= self._cold:
            timeline = None
        comparison = compare_with_prediction(predicted, measured, timeline)
        if self._session.rollouts is not None:
            comparison = self._with_sampling(comparison, records)
        lines = check_lines(comparison, str(self._session.folder))
        self.reporter.prediction_check(self._session.step, comparison, lines)
        return comparison

    def _with_sampling(
        self, prediction_check: PredictionCheck, records: Sequence[Mapping[str, Any]]
    ) -> PredictionCheck:
        """Compare steps that sample what they train on, with a prediction for the lengths that the sampled answers had."""
        session = self._session
        assert session.rollouts is not None
        expected = None
        reason = ""
        try:
            each = [rl_seconds(session.run, session.plan, *batch) for batch in session.rollouts.recent]
            expected = {
                name: fmean(getattr(seconds, name) for seconds in each) for name in ("handover", "rollout", "training")
            }
        except BadInput as error:
            reason = str(error)
        whole = fmean(record["step_seconds"] for record in records)
        parts = [
            _part(name, fmean(record[key] for record in records), expected, of_prediction)
            for key, (name, of_prediction) in PARTS.items()
        ]
        parts.append(_part("training", whole - sum(part.measured_seconds for part in parts), expected, "training"))
        total = None if expected is None else sum(expected.values())
        step = Comparison(measured=whole, predicted=total)
        return replace(
            prediction_check,
            step_seconds=step,
            tokens_per_second_per_gpu=_without_prediction(prediction_check.tokens_per_second_per_gpu),
            mfu=_without_prediction(prediction_check.mfu),
            parts=tuple(parts),
            samples=True,
            unpredicted=reason,
        )


def _part(name: str, measured: float, expected: Mapping[str, float] | None, of_prediction: str | None) -> CheckPart:
    known = expected is not None and of_prediction is not None
    return CheckPart(
        name=name, measured={name: measured}, predicted={name: expected[of_prediction]} if known else {}, known=known
    )


def _without_prediction(rate: Comparison | None) -> Comparison | None:
    """Return a rate without its prediction, which is for steps of `train.global_batch` rows only."""
    return None if rate is None else Comparison(measured=rate.measured)


def over_ranks(rank_step: TypicalStep, world: World) -> TypicalStep:
    """Return `rank_step` with the mean phases of all ranks and the largest memory of a rank. Collective over the control group."""
    means = torch.tensor(
        [bool(rank_step.phases), *(rank_step.phases.get(name, 0.0) for name in PHASES)], dtype=torch.float64
    )
    most = torch.tensor([rank_step.memory_bytes])
    dist.all_reduce(means, group=world.control)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=world.control)
    timed, *sums = means.tolist()
    phases = {str(name): total / timed for name, total in zip(PHASES, sums, strict=True) if total} if timed else {}
    return replace(rank_step, memory_bytes=int(most), phases=phases)
