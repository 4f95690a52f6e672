"""Expands a schedule from stages to FSDP units, with gathers of parameters and reductions of gradients.

A stretch is a sequence of consecutive compute actions that use the same unit. A unit's parameters are gathered for each
stretch, or once for the whole step if they are not freed. A stretch's gather is issued when the previous stretch begins:
one unit ahead.

In layered order a stretch has all micro-batches of a unit. So a unit is gathered once in the forward and once in the
backward, and reduced once. In depth-first order a stretch has one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from meshwright.schedules.action import COMPUTE, FORWARD, Action, together
from meshwright.schedules.schedule import Schedule
from meshwright.schedules.unit_collectives import Gather, Reduce, with_collectives

Order = Literal["depth_first", "layered"]
"""Order of the unit actions of a stage.

depth_first: a micro-batch runs through all units of a stage before the next micro-batch. layered: consecutive micro-batches
of a stage all run through a unit before the next unit.
"""


def expand(
    schedule: Schedule,
    units_per_stage: int | Sequence[int],
    *,
    order: Order = "depth_first",
    gather: Gather | Sequence[Sequence[Gather]] = "stretch",
    reduce: Reduce | Sequence[Sequence[Reduce]] = "once",
) -> Schedule:
    """Return the schedule in actions of units.

    `units_per_stage`: number of units of each stage, or one number for all stages. `gather` and `reduce`: when parameters are
    gathered and gradients reduced, for all units, or by stage and unit. `schedules.unit_collectives` describes the values.
    """
    count = [units_per_stage] * schedule.stages if isinstance(units_per_stage, int) else list(units_per_stage)
    gathers = [[gather] * units for units in count] if isinstance(gather, str) else gather
    reduces = [[reduce] * units for units in count] if isinstance(reduce, str) else reduce
    actions = []
    for rank_actions in schedule.actions:
        unit_actions = _cut(_steps(rank_actions), count, order)
        actions.append(with_collectives(unit_actions, gathers, reduces))
    return replace(schedule, actions=tuple(actions), units=tuple(count))


Step = tuple[tuple[Action, ...], Action | None, tuple[Action, ...]]
"""Receives, then the compute action after them (None at the end of the list), then the sends of its results."""


def _steps(actions: Iterable[Action]) -> list[Step]:
    """Group a rank's actions of whole stages into steps of one compute action each."""
    steps: list[Step] = []
    before: list[Action] = []
    for action in actions:
        if action.op in COMPUTE:
            steps.append((tuple(before), action, ()))
            before = []
        elif action.op == "send":
            receives, compute, sends = steps[-1]
            steps[-1] = receives, compute, (*sends, action)
        else:
            before.append(action)
    return [*steps, (tuple(before), None, ())]


def _cut(steps: list[Step], units: Sequence[int], order: Order) -> list[Action]:
    """Return the unit actions of all steps, in the given order."""
    unit_actions: list[Action] = []
    # Steps whose units are interleaved: those of consecutive micro-batches in layered order, else single steps.
    runs = [list(run) for _, run in groupby(steps, key=_run_key)] if order == "layered" else [[step] for step in steps]
    for run in runs:
        units_by_step = [_units(step[1], units) for step in run]
        for index in range(len(units_by_step[0])):
            for (receives, _, sends), rank_actions in zip(run, units_by_step, strict=True):
                # A stage's receives come before its first unit, its sends after its last.
                unit_actions += receives if index == 0 else ()
                unit_actions.append(rank_actions[index])
                unit_actions += sends if index == len(rank_actions) - 1 else ()
        if not units_by_step[0]:
            unit_actions += run[0][0]
    return unit_actions


def _run_key(step: Step) -> tuple[str, int] | int:
    """Return a key that is equal for consecutive steps which layered order merges: those of the same op and stage.

    Actions of two micro-batches are not merged.
    """
    compute = step[1]
    return id(step) if compute is None or compute.pair else (compute.op, compute.stage)


def _units(action: Action | None, units: Sequence[int]) -> list[Action]:
    """Return the unit actions of a stage's action: ascending units in the forward, descending in the backward.

    For an action of two micro-batches, they are actions of two micro-batches too.
    """
    if action is None:
        return []
    if action.paired:
        return [together(*pair) for pair in zip(*(_units(part, units) for part in action.pair), strict=True)]
    numbers = range(units[action.stage])
    op = action.op
    stage = action.stage
    micro_batch = action.micro_batch
    return [Action(op, stage, micro_batch, unit) for unit in (numbers if op in FORWARD else reversed(numbers))]
