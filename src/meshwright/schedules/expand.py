"""From stages to FSDP units: the same schedule with each stage's compute cut into units, and gathers and reductions added.

One rule covers every plan. A unit's parameters are gathered for a stretch of compute that uses them without another unit
in between; a unit whose parameters are kept has one stretch for the whole step. Layered order makes the stretch all
micro-batches of a unit, so it is gathered once in each direction and reduced once; depth-first order makes it one
micro-batch. The gather of a stretch is issued when the stretch before it begins: one unit ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from meshwright.schedules.action import COMPUTE, FORWARD, Action, overlap
from meshwright.schedules.schedule import Schedule
from meshwright.schedules.unit_collectives import Gather, Reduce, with_collectives

Order = Literal["depth_first", "layered"]
"""depth_first: a micro-batch runs through all units of a stage. layered: all micro-batches that the schedule runs through
a stage in one go run through a unit before the next unit."""


def expand(
    schedule: Schedule,
    units_per_stage: int | Sequence[int],
    *,
    order: Order = "depth_first",
    gather: Gather | Sequence[Sequence[Gather]] = "stretch",
    reduce: Reduce | Sequence[Sequence[Reduce]] = "once",
) -> Schedule:
    """The schedule in unit actions.

    `gather` says for all units, or by stage and unit, how long gathered parameters stay; `reduce` says likewise when
    gradients are summed over the ranks that share them. Both are described in `schedules.unit_collectives`.
    """
    count = [units_per_stage] * schedule.stages if isinstance(units_per_stage, int) else list(units_per_stage)
    gathers = [[gather] * units for units in count] if isinstance(gather, str) else gather
    reduces = [[reduce] * units for units in count] if isinstance(reduce, str) else reduce
    actions = []
    for mine in schedule.actions:
        cut = _cut(_steps(mine), count, order)
        actions.append(with_collectives(cut, gathers, reduces))
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
    """Every compute step as its units, in the order asked for."""
    cut: list[Action] = []
    runs = [list(run) for _, run in groupby(steps, key=_run_key)] if order == "layered" else [[step] for step in steps]
    for run in runs:
        rows = [_units(step[1], units) for step in run]
        for row in range(len(rows[0])):
            for (receives, _, sends), mine in zip(run, rows, strict=True):
                cut += receives if row == 0 else ()
                cut.append(mine[row])
                cut += sends if row == len(mine) - 1 else ()
        if not rows[0]:
            cut += run[0][0]
    return cut


def _run_key(step: Step) -> tuple[str, int] | int:
    """Equal for neighbours that layered order may mix: the same work of the same stage. An overlap stands alone."""
    compute = step[1]
    return id(step) if compute is None or compute.pair else (compute.op, compute.stage)


def _units(action: Action | None, units: Sequence[int]) -> list[Action]:
    """One stage action as unit actions: upwards in forward, downwards in backward, an overlap unit by unit."""
    if action is None:
        return []
    if action.pair:
        forward, backward = (_units(part, units) for part in action.pair)
        both = min(len(forward), len(backward))
        pairs = [overlap(*pair) for pair in zip(forward, backward, strict=False)]
        return pairs + forward[both:] + backward[both:]
    numbers = range(units[action.stage])
    return [action._replace(unit=unit) for unit in (numbers if action.op in FORWARD else reversed(numbers))]
