"""The second layer of the search: the sweep's best points as Plans, judged by the exact memory account and played by the simulator.

A plan whose layers differ has the fewest layers at the lean end that each pipeline rank needs to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf

import numpy as np

from meshwright.planner.candidate import Candidate, compiles, fits, over_by_rank, peak_bytes, pins_of, precision_of
from meshwright.planner.reprice import repriced
from meshwright.planner.schedule_choice import with_stages
from meshwright.planner.space import SCHEDULES, Points
from meshwright.planner.step_estimate import most_played
from meshwright.planner.sweep import Strategy
from meshwright.simulator.step_simulation import timing_of
from meshwright.simulator.timing import Timing
from meshwright.spec.layout import stage_table
from meshwright.spec.plan import BatchPlan, ExpertPlan, Gradients, LayerStrategy, MeshAxis, Plan
from meshwright.spec.run import RunSpec
from meshwright.workload.groups import shard_size

SIMULATED, LEAST, LARGE = 12, 3, 60_000
"""Plans that are played unit by unit at most, and as many as are in any case; the others are only estimated, by playing whole stages. None
is played once those before have more `_work` than the last: some take a second each."""
IMPROVED = 3
"""Of the simulated plans, the leading ones whose neighbours are simulated too; the first alone where steps are large."""
NEAR = 1.05
"""Times a plan's estimated step up to which its neighbours are simulated."""
HOPE = 0.95
"""Of an estimate by whole stages, what a kind of plans that was not played yet may take: of 175 drawn plans nine in ten took 0.99 to
1.01, of 120 on networks that show all of their traffic 0.96 to 1.04."""
ROOMY = 0.93
"""Of the memory that may be filled, for pipelines with virtual stages, which leave an eighth to fragments (4 H200s: 107 of 95 GiB).
Others filled all of it at full speed."""
ALIKE = 0.01
"""Relative difference of step times below which the simpler plan is taken."""


def plan_at(run: RunSpec, points: Points, row: int, strategy: Strategy, budget: int | None) -> Plan:
    """The plan of one point, with as few lean layers as fit `budget` bytes; all of them lean when even that does not fit.

    Raises ValueError when the pinned stages are not in the schedule's order.
    """
    mesh = points.meshes[points.mesh[row]]
    cluster, pins, pipeline = run.cluster, pins_of(run), mesh.size("pipeline")
    axes = (
        MeshAxis(
            axis=name, size=mesh.size(name), crosses="node" if mesh.crosses(name, cluster.ranks_per_node) else "device"
        )
        for name in mesh.order
    )
    used = tuple(axis for axis in axes if axis.size > 1 or axis.axis == "shard")
    shards = mesh.size("shard") * mesh.context
    plan = Plan(
        mesh=used,
        batch=BatchPlan(
            global_batch=run.train.global_batch,
            micro_batch=int(points.micro[row]),
            accumulate=int(points.accumulate[row]),
        ),
        schedule=with_stages(run, SCHEDULES[points.schedule[row]], pipeline, int(points.virtual[row]), used),
        experts=ExpertPlan(expert=mesh.expert, expert_shard=shards // mesh.expert) if run.model.experts else None,
        layers=pins.layers or (strategy.layer(strategy.rich),),
        precision=precision_of(run),
        gather_engine="copy" if points.column("copied")[row] else "kernel",
        tensor_engine="copy" if points.column("tokens copied")[row] else "kernel",
        compile=compiles(run),
    )
    if pins.layers or strategy.rich == strategy.lean:
        return plan
    return _fitted(run, plan, strategy, budget)


class Judge:
    """What is predicted of plans, by playing whole stages or unit by unit; a plan's costs are worked out once for both."""

    def __init__(self, run: RunSpec) -> None:
        self.run = run
        self._timings: dict[Plan, Timing] = {}
        self._estimates: dict[Plan, Candidate] = {}

    def estimated(self, plan: Plan) -> Candidate:
        """By whole stages."""
        if plan.without_prediction not in self._estimates:
            timing = self._timings[plan.without_prediction] = timing_of(
                self.run.model, self.run.train, plan, self.run.cluster
            )
            quick = Candidate(repriced(self.run, plan, by_units=False, timing=timing), simulated=False)
            self._estimates[plan.without_prediction] = replace(quick, estimated=quick.seconds)
        return self._estimates[plan.without_prediction]

    def played(self, one: Candidate) -> Candidate:
        """Unit by unit, of an estimated candidate."""
        timing = self._timings[one.plan.without_prediction]
        return replace(one, plan=repriced(self.run, one.plan, timing=timing), simulated=True)


def in_turn(
    guesses: Sequence[float],
    families: Sequence[tuple[object, object]],
    seconds: Callable[[int], float],
    hope: float,
    least: float = inf,
    within: float = 1.0,
) -> Iterator[int]:
    """Indices of `guesses`, the most promising plan first, each after its `seconds` are known; plans of infinite seconds are left out.

    A guess is wrong about all plans of a family alike, so the last plan of a family that was tried corrects the guesses of the others.
    `families` has the family of each plan and a wider one; a family of which no plan was tried may take `hope` times its guess, or `within`
    times what plans of the wider one took if that is not more. After `least` plans the iterator ends at the first that does not promise
    to be as fast as the fastest, within what a prediction can tell apart.
    """
    guess = np.array(guesses, dtype=float)
    family, wide = (_numbered([pair[level] for pair in families]) for level in (0, 1))
    family_ratio, wide_ratio = np.full(len(guess), np.nan), np.full(len(guess), np.nan)
    tried = np.zeros(len(guess), bool)
    fastest, count = inf, 0
    while not tried.all():
        untried_ratio = np.where(np.isnan(wide_ratio[wide]), hope, within * wide_ratio[wide])
        ratio = np.where(np.isnan(family_ratio[family]), untried_ratio, family_ratio[family])
        promised = np.where(tried, np.inf, guess * ratio)
        index = int(promised.argmin())
        if count >= least and promised[index] >= fastest * (1 + ALIKE):
            return
        tried[index] = True
        taken = seconds(index)
        if taken < inf:
            family_ratio[family[index]] = taken / guess[index]
            wide_ratio[wide[index]] = min(1.0, taken / guess[index])
            fastest, count = min(fastest, taken), count + 1
            yield index
        elif np.isnan(family_ratio[family[index]]):
            family_ratio[family[index]] = 1.0


def _numbered(values: Sequence[object]) -> np.ndarray:
    """For each value the number of its first appearance among the distinct values."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], dtype=np.int64)


def judged(judge: Judge, estimated: Iterable[Candidate]) -> list[Candidate]:
    """All candidates: those that promise most played by units, best first; then the others, as estimated."""
    ranked = sorted(estimated, key=_seconds)
    played: dict[int, Candidate] = {}

    def seconds(place: int) -> float:
        played[place] = judge.played(ranked[place])
        return played[place].seconds

    kinds = [(kind_of(plan), plan.layers[0].offload, plan.batch.micro_batch) for plan in (one.plan for one in ranked)]
    order = in_turn([one.seconds for one in ranked], [(kind, kind) for kind in kinds], seconds, HOPE, LEAST)
    leading, work = set[int](), 0
    for place in order:
        leading.add(place)
        work += _work(ranked[place].plan, judge.run.model.layers)
        if len(leading) == SIMULATED or work > LARGE:
            break
    rest = [one for place, one in enumerate(ranked) if place not in leading]
    return sorted(played.values(), key=_seconds) + rest


def kind_of(plan: Plan) -> tuple[object, ...]:
    """Plans alike in this differ in details."""
    axes = ("pipeline", "tensor", "context_ring", "context_ulysses")
    return (*(plan.axis_size(axis) for axis in axes), plan.schedule.name)


def improved(run: RunSpec, candidates: Sequence[Candidate], budget: int | None) -> list[Candidate]:
    """The candidates, and before them the faster neighbours of the leading ones: what a closed form tells apart worst is simulated."""
    many = 1 if _work(candidates[0].plan, run.model.layers) > LARGE else IMPROVED
    better, known = [], [one.plan for one in candidates if one.simulated]
    for one in candidates[:many]:
        plans = [plan for plan in _neighbours(run, one.plan) if not any(same_layout(plan, other) for other in known)]
        for plan in plans:
            known.append(plan)
            if fits(run, plan, budget) and _promising(run, plan, one):
                better.append(replace(one, plan=repriced(run, plan), estimated=None))
    better = [one for one in better if one.seconds < candidates[0].seconds * (1 + ALIKE)]
    return sorted([*better, *(one for one in candidates if one.simulated)], key=_seconds) + [
        one for one in candidates if not one.simulated
    ]


def kernel_twins(run: RunSpec, plan: Plan) -> Iterator[Plan]:
    """The plan with kernels for one of the engines that the search, and no pin, has copy: simpler plans."""
    pins = pins_of(run)
    if plan.gather_engine == "copy" and pins.gather_engine is None:
        yield replace(plan, gather_engine="kernel")
    if plan.tensor_engine == "copy" and pins.tensor_engine is None:
        yield replace(plan, tensor_engine="kernel")


def with_kernels(run: RunSpec, candidates: Sequence[Candidate], chosen: Candidate) -> list[Candidate]:
    """The candidates, and beside a chosen one that copies by choice the same plans with kernels."""
    known = [one.plan for one in candidates if one.simulated]
    new = [plan for plan in kernel_twins(run, chosen.plan) if not any(same_layout(plan, other) for other in known)]
    twins = [replace(chosen, plan=repriced(run, plan), simulated=True, estimated=None) for plan in new]
    return (
        sorted([*candidates, *twins], key=lambda one: (not one.simulated, one.seconds)) if twins else list(candidates)
    )


def _promising(run: RunSpec, plan: Plan, beside: Candidate) -> bool:
    """Whether `plan`, by whole stages, is not far behind its neighbour."""
    if beside.estimated is None:
        return True
    return Candidate(repriced(run, plan, by_units=False)).seconds < beside.estimated * NEAR


def same_layout(one: Plan, other: Plan) -> bool:
    """Whether two plans run alike, whatever is said of them."""
    return one.without_prediction == other.without_prediction


def _work(plan: Plan, layers: int) -> int:
    """How much there is to simulate: layers times micro-batches that are played, on every pipeline rank."""
    ranks = plan.axis_size("pipeline")
    return ranks * min(plan.batch.accumulate, most_played(ranks)) * layers


def _neighbours(run: RunSpec, plan: Plan) -> Iterator[Plan]:
    """The plan with its gradients kept the other way between micro-batches, and with its weights kept the other way between uses."""
    pins = pins_of(run)
    if pins.layers or shard_size(plan) == 1:
        return
    if pins.gradients is None and plan.batch.accumulate > 1 and not plan.layered:
        other: Gradients = "shard" if plan.layers[0].gradients == "whole" else "whole"
        yield replace(plan, layers=tuple(replace(layer, gradients=other) for layer in plan.layers))
    if pins.reshard is None and len({layer.reshard for layer in plan.layers}) == 1:
        yield replace(plan, layers=tuple(replace(layer, reshard=not layer.reshard) for layer in plan.layers))


def simplest(
    candidates: Sequence[Candidate],
    budget: int | None = None,
    counts: Callable[[Plan], float] = lambda plan: 1.0,
    fragile: Callable[[Plan], bool] = lambda plan: False,
) -> Candidate:
    """Of the plans that take as long as the fastest, within what a prediction can tell apart, one with the fewest parts; where that has
    virtual stages, one that leaves memory to an allocator's fragments, and before that one that is not `fragile`. `counts` says how many
    times the seconds of a plan count."""
    played = [one for one in candidates if one.simulated]
    fastest = min(one.seconds * counts(one.plan) for one in played)
    alike = [one for one in played if one.seconds * counts(one.plan) <= fastest * (1 + ALIKE)]
    roomy = inf if budget is None else ROOMY * budget

    def crowded(plan: Plan) -> bool:
        return peak_bytes(plan) > roomy and any(len(row) > 1 for row in plan.schedule.stages)

    return min(alike, key=lambda one: (fragile(one.plan), crowded(one.plan), complexity(one.plan), one.seconds))


def _seconds(candidate: Candidate) -> float:
    return candidate.seconds


def complexity(plan: Plan) -> int:
    """Things that a person has to understand: axes in use, kinds of layers, and what is done beside plain training."""
    axes = sum(axis.size > 1 for axis in plan.mesh)
    special = sum(
        (layer.recompute != "none") + 2 * (layer.offload != "none") + (layer.gradients == "whole")
        for layer in plan.layers
    )
    copied = (plan.gather_engine == "copy") + (plan.tensor_engine == "copy")
    return 2 * axes + len(plan.layers) + special + plan.layered + copied


def _fitted(run: RunSpec, plan: Plan, strategy: Strategy, budget: int | None) -> Plan:
    """`plan` with the fewest lean layers on each pipeline rank."""
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), run.model.layers)
    held = [[layer for stage in row for layer in stage] for row in table]

    def with_lean(counts: Sequence[int]) -> Plan:
        lean = {layer for layers, count in zip(held, counts, strict=True) for layer in layers[:count]}
        return replace(plan, layers=_ranges(run.model.layers, lambda layer: layer in lean, strategy))

    low, high = [0] * len(held), [len(layers) for layers in held]
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        for rank, full in enumerate(over_by_rank(run, with_lean(middle), budget)):
            if full and low[rank] < high[rank]:
                low[rank] = middle[rank] + 1
            else:
                high[rank] = middle[rank]
    return with_lean(low)


def _ranges(layers: int, lean: Callable[[int], bool], strategy: Strategy) -> tuple[LayerStrategy, ...]:
    """Neighbours of one kind in one range."""
    found = []
    for kind, run_of in groupby(range(layers), key=lean):
        members = list(run_of)
        ends = f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0])
        text = "all" if len(members) == layers else ends
        found.append(strategy.layer(strategy.lean if kind else strategy.rich, text))
    return tuple(found)
