"""Checks that a schedule, built in or written by hand, is complete and can run."""

from __future__ import annotations

from collections import Counter

from meshwright.schedules.action import COMPUTE
from meshwright.schedules.play import Play
from meshwright.schedules.schedule import Schedule
from meshwright.spec.errors import BadInput

_RESULTS = {
    "forward": ("forward",),
    "forward_only": ("forward",),
    "backward": ("gradient", "weight"),
    "backward_input": ("gradient",),
    "backward_weight": ("weight",),
}
_NAMES = {"forward": "the forward", "gradient": "the backward", "weight": "the weights' backward"}


def check(schedule: Schedule, sends_ahead: int | None = None) -> None:
    """Raise BadInput unless the schedule is complete, in a valid order, free of deadlock, and ends with the optimizer.

    `sends_ahead` is how many unmatched sends a channel accepts before the sender's host blocks. 0 means that a send blocks
    until it is received (rendezvous); None means no limit.
    """
    _check_placement(schedule)
    _check_complete(schedule)
    _check_end(schedule)
    Play(schedule, sends_ahead).run()


def _check_placement(schedule: Schedule) -> None:
    placed = sorted(stage for stages in schedule.placement for stage in stages)
    if placed != list(range(len(placed))):
        raise BadInput(
            f"schedule {schedule.name}: placement {schedule.placement} must hold every stage from 0 on, once"
        )
    if len(schedule.actions) != schedule.ranks:
        raise BadInput(f"schedule {schedule.name}: {len(schedule.actions)} lists of actions for {schedule.ranks} ranks")


def _check_complete(schedule: Schedule) -> None:
    """Raise BadInput unless each unit has exactly one forward and one backward per micro-batch, on its stage's rank.

    A backward may be whole or in two halves.
    """
    counts = _count_results(schedule)
    required = ("forward", "gradient", "weight") if schedule.trains else ("forward",)
    for stage in range(schedule.stages):
        for unit in range(schedule.units[stage] if schedule.units else 1):
            for micro_batch in range(schedule.micro_batches):
                for result in required:
                    times = counts.pop((result, stage, micro_batch, unit), 0)
                    if times != 1:
                        location = f"stage {stage}, unit {unit}, micro-batch {micro_batch}"
                        raise BadInput(
                            f"schedule {schedule.name}: {_NAMES[result]} of {location} runs {times} times, not once"
                        )
    for result, stage, micro_batch, unit in counts:
        location = f"stage {stage}, unit {unit}, micro-batch {micro_batch}"
        raise BadInput(f"schedule {schedule.name}: {_NAMES[result]} of {location} is not part of the step")


def _count_results(schedule: Schedule) -> Counter[tuple[str, int, int, int]]:
    """Return how often each (result, stage, micro-batch, unit) is computed."""
    counts: Counter[tuple[str, int, int, int]] = Counter()
    for rank, actions in enumerate(schedule.actions):
        own_stages = schedule.placement[rank]
        for part in (part for action in actions if action.op in COMPUTE for part in action.parts):
            if part.stage not in own_stages:
                raise BadInput(f"schedule {schedule.name}: rank {rank} runs {part} but holds only stages {own_stages}")
            counts.update((result, part.stage, part.micro_batch, part.unit or 0) for result in _RESULTS[part.op])
    return counts


def _check_end(schedule: Schedule) -> None:
    if not schedule.trains:
        return
    for rank, actions in enumerate(schedule.actions):
        closing = [action.op for action in actions if action.op in ("norm_barrier", "optim")]
        if closing != ["norm_barrier", "optim"] or [action.op for action in actions[-2:]] != closing:
            raise BadInput(f"schedule {schedule.name}: rank {rank} must end with one norm_barrier and one optim")
