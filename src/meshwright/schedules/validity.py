"""Whether a schedule does the whole step and can run: what every schedule must satisfy, built in or written by a person."""

from __future__ import annotations

from collections import Counter

from meshwright.schedules.action import COMPUTE
from meshwright.schedules.play import Play
from meshwright.schedules.schedule import Schedule
from meshwright.spec.errors import BadInput

_DOES = {
    "forward": ("forward",),
    "forward_only": ("forward",),
    "backward": ("gradient", "weight"),
    "backward_input": ("gradient",),
    "backward_weight": ("weight",),
}
_NAMES = {"forward": "the forward", "gradient": "the backward", "weight": "the weights' backward"}


def check(schedule: Schedule, sends_ahead: int | None = None) -> None:
    """Raise BadInput unless the schedule is complete, in a sound order, free of deadlock, and ends with the optimizer.

    `sends_ahead` is how many unmatched sends a channel takes before its sender's host blocks: 0 is a pure rendezvous,
    None leaves it unbounded.
    """
    _check_placement(schedule)
    _check_complete(schedule)
    _check_end(schedule)
    Play(schedule, sends_ahead).run()


def _check_placement(schedule: Schedule) -> None:
    held = sorted(stage for stages in schedule.placement for stage in stages)
    if held != list(range(len(held))):
        raise BadInput(
            f"schedule {schedule.name}: placement {schedule.placement} must hold every stage from 0 on, once"
        )
    if len(schedule.actions) != schedule.ranks:
        raise BadInput(f"schedule {schedule.name}: {len(schedule.actions)} lists of actions for {schedule.ranks} ranks")


def _check_complete(schedule: Schedule) -> None:
    """Each unit of each stage meets each micro-batch in one forward and one backward, whole or in halves, on its rank."""
    seen = _counted(schedule)
    wanted = ("forward", "gradient", "weight") if schedule.trains else ("forward",)
    for stage in range(schedule.stages):
        for unit in range(schedule.units[stage] if schedule.units else 1):
            for micro_batch in range(schedule.micro_batches):
                for what in wanted:
                    times = seen.pop((what, stage, micro_batch, unit), 0)
                    if times != 1:
                        where = f"stage {stage}, unit {unit}, micro-batch {micro_batch}"
                        raise BadInput(
                            f"schedule {schedule.name}: {_NAMES[what]} of {where} runs {times} times, not once"
                        )
    for what, stage, micro_batch, unit in seen:
        where = f"stage {stage}, unit {unit}, micro-batch {micro_batch}"
        raise BadInput(f"schedule {schedule.name}: {_NAMES[what]} of {where} is not part of the step")


def _counted(schedule: Schedule) -> Counter[tuple[str, int, int, int]]:
    """How often each (what, stage, micro-batch, unit) runs."""
    seen: Counter[tuple[str, int, int, int]] = Counter()
    for rank, actions in enumerate(schedule.actions):
        held = schedule.placement[rank]
        for part in (part for action in actions if action.op in COMPUTE for part in action.parts):
            if part.stage not in held:
                raise BadInput(f"schedule {schedule.name}: rank {rank} runs {part} but holds only stages {held}")
            seen.update((what, part.stage, part.micro_batch, part.unit or 0) for what in _DOES[part.op])
    return seen


def _check_end(schedule: Schedule) -> None:
    if not schedule.trains:
        return
    for rank, actions in enumerate(schedule.actions):
        closing = [action.op for action in actions if action.op in ("norm_barrier", "optim")]
        if closing != ["norm_barrier", "optim"] or [action.op for action in actions[-2:]] != closing:
            raise BadInput(f"schedule {schedule.name}: rank {rank} must end with one norm_barrier and one optim")
