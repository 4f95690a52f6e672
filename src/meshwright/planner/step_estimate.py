"""Predicts the parts of a plan's step time with the simulator: unit by unit, or by whole stages in a tenth of the work.

Both simulate a few micro-batches and extrapolate linearly to the plan's number: apart from filling and draining, a schedule is periodic. On
unlike ranks the slowest rank of a short step may not be that of a long one, so no step is shorter than its busiest rank.
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
STAGES = (2, 3)
DEEP = 16
"""Micro-batches per pipeline rank in the two short steps, by units and by stages.

By stages at most 1% off where compared; (1, 2) was 15% off. From the third number of ranks on, only the first of the
second is simulated by units.
"""
Parts = dict[str, float]
"""Seconds by the names of `Timeline.breakdown`; their sum is the step."""
Play = Callable[[Plan, Timing], Timeline | Totals]


def simulated_by_units(run: RunSpec, plan: Plan, timing: Timing | None = None) -> Parts:
    """Seconds of the step's parts from a simulation of every gather and reduction. Raises BadInput as `simulate_plan` does.

    `timing` is computed if not given. Of a deep pipeline only a short step is simulated by units; its difference from the short step by
    stages is added to the full step by stages, which was at most 0.2% off where compared.
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
    """Most micro-batches that are simulated unit by unit for `ranks` pipeline ranks.

    A shallow pipeline plays this many micro-batches, 7 for each rank:

    >>> most_played(4)
    28
    """
    return (STAGES[0] if ranks >= DEEP else sum(UNITS)) * ranks


def simulated_by_stages(run: RunSpec, plan: Plan, timing: Timing | None = None) -> Parts:
    """Seconds of the step's parts from a simulation of whole stages. Raises as `simulated_by_units`."""
    timing = timing or timing_of(run.model, run.train, plan, run.cluster)
    return _shortened(plan, timing, _stage_simulation(run, plan), STAGES)


def _stage_simulation(run: RunSpec, plan: Plan) -> Play:
    """A function that plays a short step of `plan` by whole stages."""
    layers = run.model.layers
    durations = cache(partial(StageDurations, units=unit_strategies(plan, layers), layered=plan.layered))

    def play(short: Plan, short_timing: Timing) -> Totals:
        if plan.paired:  # like half as many micro-batches that are twice as large
            half = replace(short.batch, accumulate=short.batch.accumulate // 2)
            short = replace(short, batch=half, schedule=replace(short.schedule, name="1f1b"))
            short_timing = short_timing.with_larger_micro_batches(2.0)
        program = stage_program(short, layers)
        return simulate_stages(
            program, durations(short_timing, program.micro_batches if plan.layered else min(2, program.micro_batches))
        )

    return play


def _is_long(plan: Plan, per_rank: tuple[int, int]) -> bool:
    """Whether the plan has more micro-batches than the longer of the two short steps."""
    return plan.batch.accumulate > (per_rank[1] + 1) * _period(plan)


def _period(plan: Plan) -> int:
    """Micro-batches after which the plan's schedule repeats itself."""
    return 2 if plan.paired else plan.axis_size("pipeline")


def _short_step(plan: Plan, timing: Timing, per_rank: int) -> tuple[Plan, Timing]:
    """The plan with `per_rank` micro-batches per pipeline rank, plus the remainder that makes its groups uneven.

    In layered order the fewer micro-batches are stretched to the time of all, because together they hide a unit's collectives.
    """
    period = _period(plan)
    full_count = plan.batch.accumulate
    count = per_rank * period if plan.layered else per_rank * period + full_count % period
    short_timing = timing.with_larger_micro_batches(full_count / count) if plan.layered else timing
    return replace(plan, batch=replace(plan.batch, accumulate=count)), short_timing


def _shortened(plan: Plan, timing: Timing, play: Play, per_rank: tuple[int, int]) -> Parts:
    """The parts of the plan's step by `play`; of a long step extrapolated from two short ones."""
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
    # Apart from filling and draining each micro-batch takes the same time.
    slope = (count - longer_count) / (longer_count - shorter_count)
    parts = {name: seconds + slope * (seconds - before[name]) for name, seconds in second.breakdown.items()}
    own = zip(second.start_seconds, first.own_seconds, second.own_seconds, strict=True)
    busiest = max(start + seconds + slope * (seconds - earlier) for start, earlier, seconds in own)
    return parts | {"idle": parts["idle"] + max(0.0, busiest - sum(parts.values()))}
