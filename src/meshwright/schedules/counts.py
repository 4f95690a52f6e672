"""How often a step gathers and reduces what."""

from __future__ import annotations

from collections import Counter

from meshwright.schedules.schedule import Schedule


def collectives_of(schedule: Schedule) -> dict[tuple[int, int], tuple[int, int]]:
    """By (stage, unit) of an expanded schedule: gathers of its parameters and reductions of its gradients in one step."""
    found = Counter((a.kind, a.stage, a.unit or 0) for row in schedule.actions for a in row)
    units = schedule.units or (1,) * schedule.stages
    return {
        (stage, unit): (found["unshard", stage, unit], found["reduce_grad", stage, unit])
        for stage, count in enumerate(units)
        for unit in range(count)
    }
