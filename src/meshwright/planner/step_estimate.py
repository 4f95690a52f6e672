"""Where a plan's step goes, in seconds: played by the simulator unit by unit, or, for ranking many plans, in a tenth of the work by stages.

Both play few micro-batches and draw a straight line to the plan's number: past filling and draining, a schedule repeats itself. Where ranks
are unlike, what sets the pace of few need not set that of many: no step is shorter than its busiest rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.schedules.plan_schedule import training_schedule, unit_strategies
from meshwright.simulator.simulate import simulate
from meshwright.simulator.stage_play import Totals, play_stages
from meshwright.simulator.step_simulation import stage_program, timing_of
from meshwright.simulator.timeline import Timeline
from meshwright.simulator.timing import Timing
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

UNITS, STAGES, DEEP = (3, 4), (2, 3), 16
"""Micro-batches for each pipeline rank that are played instead of many, unit by unit and by stages, and ranks from which on the second are
enough for both: where measured they were 1% off at most, and (1, 2) 15%."""
Parts = dict[str, float]
"""Seconds by `Timeline.breakdown`'s names; they add up to the step."""
Play = Callable[[Plan, Timing], Timeline | Totals]


def played_by_units(run: RunSpec, plan: Plan, timing: Timing | None = None) -> Parts:
    """With every gather and reduction; `timing` is made when it is not there yet. Raises BadInput as `simulate_plan` does."""
    timing = timing or timing_of(run.model, run.train, plan, run.cluster)
    times = UNITS if plan.axis_size("pipeline") < DEEP else STAGES
    return _shortened(
        plan, timing, lambda few, taking: simulate(training_schedule(few, run.model.layers), taking), times
    )


def played_by_stages(run: RunSpec, plan: Plan, timing: Timing | None = None) -> Parts:
    """Whole stages, with what their units' collectives show. Raises as `played_by_units`."""
    timing, layers = timing or timing_of(run.model, run.train, plan, run.cluster), run.model.layers
    units = unit_strategies(plan, layers)

    def play(few: Plan, taking: Timing) -> Totals:
        return play_stages(stage_program(few, layers), taking, units, layered=plan.layered)

    return _shortened(plan, timing, play, STAGES)


def _shortened(plan: Plan, timing: Timing, play: Play, times: tuple[int, int]) -> Parts:
    """The parts of the plan as `play` plays it, from two shorter ones with so many micro-batches a rank when it has many."""
    ranks, wanted = plan.axis_size("pipeline"), plan.batch.accumulate
    if wanted <= (times[1] + 1) * ranks:
        return play(plan, timing).breakdown
    return (_in_larger_parts if plan.layered else _in_line)(plan, timing, play, times)


def _in_larger_parts(plan: Plan, timing: Timing, play: Play, times: tuple[int, int]) -> Parts:
    """With fewer micro-batches that take as long together: in layered order all of a unit's hide its collectives. What larger ones idle
    more is proportional to their size."""
    ranks, wanted = plan.axis_size("pipeline"), plan.batch.accumulate
    few, more = (count * ranks for count in times)
    first, second = (
        play(_with_micro_batches(plan, count), timing.stretched(wanted / count)).breakdown for count in (few, more)
    )
    steep = (1 / more - 1 / wanted) / (1 / few - 1 / more)
    return {name: max(0.0, seconds - steep * (first[name] - seconds)) for name, seconds in second.items()}


def _in_line(plan: Plan, timing: Timing, play: Play, times: tuple[int, int]) -> Parts:
    """Past filling and draining each micro-batch takes as long as the one before."""
    ranks, wanted = plan.axis_size("pipeline"), plan.batch.accumulate
    # A remainder makes groups uneven; the short plans have the same one.
    few, more = (count * ranks + wanted % ranks for count in times)
    first, second = (play(_with_micro_batches(plan, count), timing) for count in (few, more))
    steep = (wanted - more) / (more - few)
    before = first.breakdown
    parts = {name: seconds + steep * (seconds - before[name]) for name, seconds in second.breakdown.items()}
    own = zip(second.start_seconds, first.own_seconds, second.own_seconds, strict=True)
    busiest = max(start + seconds + steep * (seconds - earlier) for start, earlier, seconds in own)
    return parts | {"idle": parts["idle"] + max(0.0, busiest - sum(parts.values()))}


def _with_micro_batches(plan: Plan, count: int) -> Plan:
    return replace(plan, batch=replace(plan.batch, accumulate=count))
