"""Counts gathers and reductions of each unit in one step."""

from __future__ import annotations

from collections import Counter

from meshwright.schedules.schedule import Schedule


def collective_counts(schedule: Schedule) -> dict[tuple[int, int], tuple[int, int]]:
    """By (stage, unit) of an expanded schedule: gathers of its parameters and reductions of its gradients in one step."""
    counts = Counter((a.op, a.stage, a.unit or 0) for rank_actions in schedule.actions for a in rank_actions)
    units = schedule.units or (1,) * schedule.stages
    return {
        (stage, unit): (counts["unshard", stage, unit], counts["reduce_grad", stage, unit])
        for stage, count in enumerate(units)
        for unit in range(count)
    }
