"""Counts how often each FSDP unit is gathered and reduced in one step."""

from __future__ import annotations

from collections import Counter

from meshwright.schedules.schedule import Schedule


def collective_counts(schedule: Schedule) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (gathers of parameters, reductions of gradients) of one step, for each (stage, unit).

    `schedule` must consist of unit actions (`schedules.expand`).
    """
    counts = Counter(
        (action.op, action.stage, action.unit or 0) for rank_actions in schedule.actions for action in rank_actions
    )
    units = schedule.units or (1,) * schedule.stages
    return {
        (stage, unit): (counts["unshard", stage, unit], counts["reduce_grad", stage, unit])
        for stage, count in enumerate(units)
        for unit in range(count)
    }
