"""Predicts the parts of a plan's step time with the simulator: unit by unit, or by whole stages, which takes a tenth of
the work.

Both simulate a few micro-batches and extrapolate linearly to the plan's number, because a schedule is periodic except
while it fills and drains. If ranks differ, the slowest rank of a short step may not be the slowest rank of a long step.
So the result is never shorter than the work of the busiest rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from meshwright.schedules.plan_schedule import training_schedule, unit_strategies
from meshwright.simulator.simulate import simulate
from meshwright.simulator.stage_simulation import StageDurations, Totals, simulate_stages
from meshwright.simulator.step_simulation import stage_program, timing_of
from meshwright.simulator.timeline import Timeline
from meshwright.simulator.timing import Timing
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec

UNITS = (3, 4)
"""Micro-batches per pipeline rank in the two short steps that are simulated unit by unit."""
STAGES = (2, 3)
"""Micro-batches per pipeline rank in the two short steps that are simulated by whole stages.

Results are at most 1% wrong in the cases that were compared; with (1, 2) they were 15% wrong.
"""
DEEP = 16
"""From this number of pipeline ranks on, only a step of `STAGES[0]` micro-batches per rank is simulated unit by unit.
"""
Parts = dict[str, float]
"""Seconds by the names in `Timeline.breakdown`; their sum is the step time."""
Play = Callable[[Plan, Timing], Timeline | Totals]
"""A function that simulates a short step."""


def simulated_by_units(run: RunSpec, plan: Plan, timing: Timing | None = None) -> Parts:
    """Return the seconds of the step's parts, from a simulation of every gather and every reduction.

    `timing` is computed if it is None. For a deep pipeline, only a short step is simulated unit by unit. The difference
    between this step and the same step by whole stages is added to the full step by whole stages. That was at most 0.2%
    wrong in the cases that were compared. Raises BadInput as `simulate_plan` does.
    """
    timing = timing or timing_of(run.model, run.train, plan, run.cluster)
    layers = run.model.layers

    def play(short: Plan, short_timing: Timing) -> Timeline:
        return simulate(training_schedule(short, layers), short_timing)

    if plan.axis_size("pipeline") < DEEP or not _is_long(plan, STAGES):
        return _shortened(plan, timing, play, UNITS)
    short, short_timing = _short_step(plan, timing, STAGES[0])
    by_units = play(short, short_timing).breakdown
    by_stages = _stage_simulation(run, plan)(short, short_timing).breakdown
    whole = simulated_by_stages(run, plan, timing)
    return {name: max(0.0, seconds + by_units[name] - by_stages[name]) for name, seconds in whole.items()}


def most_played(ranks: int) -> int:
    """Return the largest number of micro-batches that is simulated unit by unit for `ranks` pipeline ranks.

    A pipeline that is not deep simulates 3 + 4 micro-batches for each rank:

    >>> most_played(4)
    28
    """
    return (STAGES[0] if ranks >= DEEP else sum(UNITS)) * ranks


def simulated_by_stages(run: RunSpec, plan: Plan, timing: Timing | None = None) -> Parts:
    """Return the seconds of the step's parts from a simulation of whole stages. Raises as `simulated_by_units`."""
    timing = timing or timing_of(run.model, run.train, plan, run.cluster)
    return _shortened(plan, timing, _stage_simulation(run, plan), STAGES)


def _stage_simulation(run: RunSpec, plan: Plan) -> Play:
    """Return a function that simulates a short step of `plan` by whole stages."""
    layers = run.model.layers
    durations = cache(partial(StageDurations, units=unit_strategies(plan, layers), layered=plan.layered))

    def play(short: Plan, short_timing: Timing) -> Totals:
        if plan.paired:  # simulated as half as many micro-batches of twice the size
            half = replace(short.batch, accumulate=short.batch.accumulate // 2)
            short = replace(short, batch=half, schedule=replace(short.schedule, name="1f1b"))
            short_timing = short_timing.with_larger_micro_batches(2.0)
        program = stage_program(short, layers)
        return simulate_stages(
            program, durations(short_timing, program.micro_batches if plan.layered else min(2, program.micro_batches))
        )

    return play


def _is_long(plan: Plan, per_rank: tuple[int, int]) -> bool:
    """Return whether the plan has more micro-batches than the longer of the two short steps."""
    return plan.batch.accumulate > (per_rank[1] + 1) * _period(plan)


def _period(plan: Plan) -> int:
    """Return the number of micro-batches after which the plan's schedule repeats itself."""
    return 2 if plan.paired else plan.axis_size("pipeline")


def _short_step(plan: Plan, timing: Timing, per_rank: int) -> tuple[Plan, Timing]:
    """Return the plan with fewer micro-batches, and the timing for it.

    It has `per_rank` micro-batches per pipeline rank, plus the remainder of the plan's number. In layered order, all
    micro-batches run through a unit before the next unit, and together they hide the collectives of the unit. So each of
    the fewer micro-batches takes longer, and all of them together take as long as the plan's micro-batches.
    """
    period = _period(plan)
    full_count = plan.batch.accumulate
    count = per_rank * period if plan.layered else per_rank * period + full_count % period
    short_timing = timing.with_larger_micro_batches(full_count / count) if plan.layered else timing
    return replace(plan, batch=replace(plan.batch, accumulate=count)), short_timing


def _shortened(plan: Plan, timing: Timing, play: Play, per_rank: tuple[int, int]) -> Parts:
    """Return the parts of the plan's step.

    `play` simulates the step itself, or for a long step two short ones, from which it is extrapolated.

    Example: steps of 4 and of 6 micro-batches take 10 and 14 seconds. Two further micro-batches take 4 seconds, so a
    step of 20 micro-batches takes 14 + 7 · 4 = 42 seconds.
    """
    if not _is_long(plan, per_rank):
        return play(plan, timing).breakdown
    short_steps = [_short_step(plan, timing, times) for times in per_rank]
    shorter_count, longer_count = (short.batch.accumulate for short, _ in short_steps)
    first, second = (play(*step) for step in short_steps)
    count = plan.batch.accumulate
    before = first.breakdown
    if plan.layered:
        # The idle time that larger micro-batches add is proportional to their size.
        slope = (1 / longer_count - 1 / count) / (1 / shorter_count - 1 / longer_count)
        return {
            name: max(0.0, seconds - slope * (before[name] - seconds)) for name, seconds in second.breakdown.items()
        }
    # Except while the pipeline fills and drains, each micro-batch takes the same time.
    slope = (count - longer_count) / (longer_count - shorter_count)
    parts = {name: seconds + slope * (seconds - before[name]) for name, seconds in second.breakdown.items()}
    own = zip(second.start_seconds, first.own_seconds, second.own_seconds, strict=True)
    busiest = max(start + seconds + slope * (seconds - earlier) for start, earlier, seconds in own)
    return parts | {"idle": parts["idle"] + max(0.0, busiest - sum(parts.values()))}
