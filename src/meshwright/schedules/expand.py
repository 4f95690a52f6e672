"""Expansion of a schedule from stages to FSDP units, with gathers of parameters and reductions of gradients.

A stretch is a run of consecutive compute actions that use the same unit. A unit's parameters are gathered for a stretch,
or once for the whole step if they are not freed. In layered order a stretch has all micro-batches of a unit, so the unit
is gathered once in each direction and reduced once; in depth-first order it has one micro-batch. The gather of a stretch
is issued when the previous stretch begins: one unit ahead.
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
"""depth_first: a micro-batch runs through all units of a stage. layered: consecutive
micro-batches of a stage all run through a unit before the next unit."""


def expand(
    schedule: Schedule,
    units_per_stage: int | Sequence[int],
    *,
    order: Order = "depth_first",
    gather: Gather | Sequence[Sequence[Gather]] = "stretch",
    reduce: Reduce | Sequence[Sequence[Reduce]] = "once",
) -> Schedule:
    """The schedule in unit actions.

    `gather` and `reduce` set, for all units or by stage and unit, when parameters are gathered and gradients reduced.
    Their values are described in `schedules.unit_collectives`.
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
"""Receives, the compute after them (None at the end of the list), and its sends."""


def _steps(actions: Iterable[Action]) -> list[Step]:
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
    """The unit actions of all compute steps, in the given order."""
    unit_actions: list[Action] = []
    runs = [list(run) for _, run in groupby(steps, key=_run_key)] if order == "layered" else [[step] for step in steps]
    for run in runs:
        units_by_step = [_units(step[1], units) for step in run]
        for index in range(len(units_by_step[0])):
            for (receives, _, sends), rank_actions in zip(run, units_by_step, strict=True):
                unit_actions += receives if index == 0 else ()
                unit_actions.append(rank_actions[index])
                unit_actions += sends if index == len(rank_actions) - 1 else ()
        if not units_by_step[0]:
            unit_actions += run[0][0]
    return unit_actions


def _run_key(step: Step) -> tuple[str, int] | int:
    """Equal for consecutive steps that layered order merges: same op, same stage. Actions of two micro-batches are not merged."""
    compute = step[1]
    return id(step) if compute is None or compute.pair else (compute.op, compute.stage)


def _units(action: Action | None, units: Sequence[int]) -> list[Action]:
    """The unit actions of a stage action: ascending in forward, descending in backward; pairs for two micro-batches."""
    if action is None:
        return []
    if action.paired:
        return [together(*pair) for pair in zip(*(_units(part, units) for part in action.pair), strict=True)]
    numbers = range(units[action.stage])
    op = action.op
    stage = action.stage
    micro_batch = action.micro_batch
    return [Action(op, stage, micro_batch, unit) for unit in (numbers if op in FORWARD else reversed(numbers))]
