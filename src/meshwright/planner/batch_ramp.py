"""Checks whether a plan, which is made for `train.global_batch`, can also run the smaller batches of
`train.batch_ramp`.
"""

from __future__ import annotations

import math

from meshwright.planner.candidate import pins_of
from meshwright.schedules.plan_schedule import schedule_key
from meshwright.schedules.registry import refusal
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec


def ramp_misfit(run: RunSpec, plan: Plan) -> str | None:
    """Return why the plan cannot run one of the ramp's batches; None if it can run all of them.

    A batch must divide into whole micro-batches, and the schedule must support their number. The text names the nearest
    batch that divides.
    """
    data = plan.data_ranks
    micro = plan.batch.micro_batch
    micro_is_given = pins_of(run).micro_batch is not None or (run.plan != "auto" and isinstance(run.plan, str))
    name, ranks, _, stages = schedule_key(plan, run.model.layers)
    for stage in run.train.batch_ramp:
        key = f"train.batch_ramp: batch {stage.batch}"
        per_rank = stage.batch // data
        if stage.batch % data and not micro_is_given:
            expected = f"a multiple of the {data} data ranks"
            unit = data
        else:
            expected = f"a multiple of {data} data ranks x micro-batch {micro}"
            unit = data * micro
        if stage.batch % unit:
            near = min(max(round(stage.batch / unit), 1) * unit, run.train.global_batch)
            other = "" if stage.batch % data else f", or plan.micro_batch={math.gcd(per_rank, micro)}"
            return f"{key}: expected {expected} (nearest: {near}{other})"
        if refused := refusal(name, ranks, per_rank // micro, stages):
            return f"{key}: {refused} (a micro-batch has {data * micro} sequences of all ranks)"
    return None
