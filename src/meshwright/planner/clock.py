"""Where a plan's step goes, in seconds: played by the simulator unit by unit, or, for ranking many plans, in a tenth of the work by stages.

Both play few micro-batches and draw a straight line to the plan's number: past filling and draining, a schedule repeats itself. Where ranks
are unlike, what sets the pace of few need not set that of many: no step is shorter than its busiest rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.schedules.of_plan import stage_schedule, training_schedule
from meshwright.schedules.schedule import Schedule
from meshwright.simulator.of_plan import timing_of
from meshwright.simulator.simulate import simulate
from meshwright.simulator.timeline import Timeline
from meshwright.simulator.timing import Table, Timing
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

FEW, MORE = 3, 4
"""Micro-batches for each pipeline rank that are played instead of many."""
Parts = dict[str, float]
"""Seconds by `Timeline.breakdown`'s names; they add up to the step."""


def played_by_units(run: RunSpec, plan: Plan, timing: Timing | None = None) -> Parts:
    """With every gather and reduction; `timing` is made when it is not there yet. Raises BadInput as `simulate_plan` does."""
    timing = timing or timing_of(run.model, run.train, plan, run.cluster)
    return _in_line(plan, lambda few: simulate(training_schedule(few, run.model.layers), timing))


def played_by_stages(run: RunSpec, plan: Plan, timing: Timing | None = None) -> Parts:
    """Stages played whole, and of gathers and reductions what compute cannot hide. Raises as `played_by_units`."""
    timing = timing or timing_of(run.model, run.train, plan, run.cluster)
    parts = _in_line(plan, lambda few: simulate(stage_schedule(few, run.model.layers), _whole(timing)))
    schedule = stage_schedule(plan, run.model.layers)
    shown = max(_not_hidden(plan, timing, schedule, rank) for rank in range(schedule.ranks))
    return parts | {"shard": parts["shard"] + shown}


def _in_line(plan: Plan, play: Callable[[Plan], Timeline]) -> Parts:
    """The parts of the plan as `play` plays it, from two shorter ones when it has many micro-batches."""
    ranks, wanted = plan.axis_size("pipeline"), plan.batch.accumulate
    if wanted <= (MORE + 1) * ranks:
        return play(plan).breakdown
    # A remainder makes groups uneven; the short plans have the same one.
    few, more = (times * ranks + wanted % ranks for times in (FEW, MORE))
    first, second = (play(_with_micro_batches(plan, count)) for count in (few, more))
    steep = (wanted - more) / (more - few)
    before = first.breakdown
    parts = {name: seconds + steep * (seconds - before[name]) for name, seconds in second.breakdown.items()}
    own = zip(second.start_seconds, first.own_seconds, second.own_seconds, strict=True)
    busiest = max(start + seconds + steep * (seconds - earlier) for start, earlier, seconds in own)
    return parts | {"idle": parts["idle"] + max(0.0, busiest - sum(parts.values()))}


def _with_micro_batches(plan: Plan, count: int) -> Plan:
    return replace(plan, batch=replace(plan.batch, accumulate=count))


def _whole(timing: Timing) -> Timing:
    """Stages as one unit each, without collectives and the copies for them."""
    return replace(
        timing, forward=_summed(timing.forward), backward_input=_summed(timing.backward_input),
        backward_weight=_summed(timing.backward_weight), unshard=(), reduce=(), replicate=(), copy_out=(), copy_in=(), accumulate=(),
    )  # fmt: skip


def _not_hidden(plan: Plan, timing: Timing, schedule: Schedule, rank: int) -> float:
    """Collective seconds of a rank beyond its compute, what the hidden ones slow compute down by, and compute's copies for them."""
    layer, many, held = plan.layers[0], plan.batch.accumulate, schedule.placement[rank]
    times = 1 if plan.layered else many
    gathers = 2 * times if layer.reshard else 1
    reductions = times if layer.gradients == "shard" else 1
    gathering = gathers * _total(timing.unshard, held)
    reducing = reductions * _total(timing.reduce, held) + _total(timing.replicate, held)
    travelling = gathering + reducing
    compute = many * sum(
        _total(table, held) for table in (timing.forward, timing.backward_input, timing.backward_weight)
    )
    copies = gathers * _total(timing.copy_out, held) + reductions * _total(timing.copy_in, held)
    copies += (many - reductions) * _total(timing.accumulate, held)
    taken = gathering * (1 - 1 / timing.gather_slowdown) + reducing * (1 - 1 / timing.reduce_slowdown)
    hidden = min(1.0, compute / travelling) if travelling else 0.0
    return max(0.0, travelling - compute) + hidden * taken + copies


def _total(table: Table, stages: tuple[int, ...]) -> float:
    return sum(sum(table[stage]) for stage in stages) if table else 0.0


def _summed(table: Table) -> Table:
    return [[sum(row)] for row in table]
