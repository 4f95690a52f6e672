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
"""Micro-batches for each pipeline rank that are played instead of many, unit by unit and by stages (the second were 1% off at most where
measured, and (1, 2) 15%), and ranks from which on only the first of the second is played unit by unit."""
Parts = dict[str, float]
"""Seconds by `Timeline.breakdown`'s names; they add up to the step."""
Play = Callable[[Plan, Timing], Timeline | Totals]


def played_by_units(run: RunSpec, plan: Plan, timing: Timing | None = None) -> Parts:
    """With every gather and reduction; `timing` is made when it is not there yet. Raises BadInput as `simulate_plan` does.

    Of a deep pipeline only the filling and draining: what units differ by from stages in a short step is added to the step by stages, which
    was 0.2% off at most where measured.
    """
    timing, layers = timing or timing_of(run.model, run.train, plan, run.cluster), run.model.layers

    def play(few: Plan, taking: Timing) -> Timeline:
        return simulate(training_schedule(few, layers), taking)

    if plan.axis_size("pipeline") < DEEP or not _is_long(plan, STAGES):
        return _shortened(plan, timing, play, UNITS)
    short, taking = _short_step(plan, timing, STAGES[0])
    by_units, by_stages = play(short, taking).breakdown, _stage_play(run, plan)(short, taking).breakdown
    whole = played_by_stages(run, plan, timing)
    return {name: max(0.0, seconds + by_units[name] - by_stages[name]) for name, seconds in whole.items()}


def most_played(ranks: int) -> int:
    """Micro-batches that are played unit by unit at most, in all, on so many pipeline ranks."""
    return (STAGES[0] if ranks >= DEEP else sum(UNITS)) * ranks


def played_by_stages(run: RunSpec, plan: Plan, timing: Timing | None = None) -> Parts:
    """Whole stages, with what their units' collectives show. Raises as `played_by_units`."""
    timing = timing or timing_of(run.model, run.train, plan, run.cluster)
    return _shortened(plan, timing, _stage_play(run, plan), STAGES)


def _stage_play(run: RunSpec, plan: Plan) -> Play:
    layers = run.model.layers
    units = unit_strategies(plan, layers)
    return lambda few, taking: play_stages(stage_program(few, layers), taking, units, layered=plan.layered)


def _is_long(plan: Plan, times: tuple[int, int]) -> bool:
    """Whether the plan has more micro-batches than both of the shorter steps have."""
    return plan.batch.accumulate > (times[1] + 1) * plan.axis_size("pipeline")


def _short_step(plan: Plan, timing: Timing, times: int) -> tuple[Plan, Timing]:
    """The plan with `times` micro-batches for each pipeline rank, and the remainder that makes groups uneven; in layered order with fewer
    micro-batches that take as long together, as all of a unit's hide its collectives."""
    ranks, wanted = plan.axis_size("pipeline"), plan.batch.accumulate
    count = times * ranks if plan.layered else times * ranks + wanted % ranks
    taking = timing.stretched(wanted / count) if plan.layered else timing
    return replace(plan, batch=replace(plan.batch, accumulate=count)), taking


def _shortened(plan: Plan, timing: Timing, play: Play, times: tuple[int, int]) -> Parts:
    """The parts of the plan as `play` plays it, from two shorter ones with so many micro-batches a rank when it has many."""
    if not _is_long(plan, times):
        return play(plan, timing).breakdown
    shorter = [_short_step(plan, timing, count) for count in times]
    few, more = (short.batch.accumulate for short, _ in shorter)
    first, second = (play(*short) for short in shorter)
    wanted, before = plan.batch.accumulate, first.breakdown
    if plan.layered:
        # What larger micro-batches idle more is proportional to their size.
        steep = (1 / more - 1 / wanted) / (1 / few - 1 / more)
        return {
            name: max(0.0, seconds - steep * (before[name] - seconds)) for name, seconds in second.breakdown.items()
        }
    # Past filling and draining each micro-batch takes as long as the one before.
    steep = (wanted - more) / (more - few)
    parts = {name: seconds + steep * (seconds - before[name]) for name, seconds in second.breakdown.items()}
    own = zip(second.start_seconds, first.own_seconds, second.own_seconds, strict=True)
    busiest = max(start + seconds + steep * (seconds - earlier) for start, earlier, seconds in own)
    return parts | {"idle": parts["idle"] + max(0.0, busiest - sum(parts.values()))}
