"""What a run says of its own plan: measured step time and memory beside the predicted ones, once behind the warm-up and again at its end.
A run whose step time is not predicted has nothing to compare early, and says its figures at its end alone.

Everything comes from step lines that were written already; ranks exchange two short tensors between their processors, twice a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from meshwright.events.span import PHASES
from meshwright.observe.prediction_account import (
    ENOUGH,
    FEWEST,
    KEPT,
    WARM_UP,
    Account,
    Typical,
    account,
    lines,
    typical,
)
from meshwright.parallel.world import World
from meshwright.training.reporting import Reporter
from meshwright.training.session import Session
from meshwright.training.waiting import DataWait

Summary = Mapping[str, Any]


class Accounting:
    """Passes step lines on to the reporter and keeps the newest of this start, on every rank."""

    def __init__(self, session: Session, reporter: Reporter) -> None:
        self._session, self._reporter = session, reporter
        self._cold = session.step + WARM_UP
        self._enough = self._cold + ENOUGH
        self._steps: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.waiting = DataWait(self._cold)

    def step(self, record: dict[str, Any]) -> None:
        """A finished step's line. The reporter comes last: when it fails on one rank, all ranks still count the same steps."""
        self.waiting.step(record)
        if record["step"] > self._cold:
            self._steps.append(record)
        self._reporter.step(record)

    def end_step(self, step: int, timeline: Summary | None) -> None:
        """Step `step` was launched; says once how the first steps behind the warm-up compare. Collective at that step."""
        said = self._session.plan.predicted
        if said is None or said.step_seconds is None:
            return
        if step == self._enough + 1:  # the device is a step behind
            self._tell([record for record in self._steps if record["step"] <= self._enough], timeline)

    def close(self, timeline: Summary | None) -> Account | None:
        """Every step was read: how all of them compare, or None after too few. Collective."""
        return self._tell(list(self._steps), timeline)

    def _tell(self, records: list[dict[str, Any]], timeline: Summary | None) -> Account | None:
        predicted, found = self._session.plan.predicted, typical(records)
        if predicted is None or found is None or len(records) < FEWEST:
            return None
        found = over_ranks(found, self._session.world)
        if timeline is not None and timeline["steps"][0] <= self._cold:
            timeline = None
        told = account(predicted, found, timeline)
        self._reporter.account(self._session.step, told, lines(told, str(self._session.folder)))
        return told


def over_ranks(mine: Typical, world: World) -> Typical:
    """`mine` with phases as means over all ranks and memory as the fullest rank's, over the control group; collective."""
    means = torch.tensor([bool(mine.phases), *(mine.phases.get(name, 0.0) for name in PHASES)], dtype=torch.float64)
    most = torch.tensor([mine.memory_bytes])
    dist.all_reduce(means, group=world.control)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=world.control)
    timed, *sums = means.tolist()
    phases = {str(name): total / timed for name, total in zip(PHASES, sums, strict=True) if total} if timed else {}
    return replace(mine, memory_bytes=int(most), phases=phases)
