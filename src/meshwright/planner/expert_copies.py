"""Variants of a plan with copies and other owners of experts, where recorded loads determine their gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.planner.candidate import Candidate, fits, pins_of, untrainable
from meshwright.planner.reprice import reprice
from meshwright.spec.job import EQUAL_LOADS
from meshwright.spec.plan import ExpertPlan, Plan
from meshwright.spec.run import RunSpec
from meshwright.workload.groups import copies_experts, experts_over

POLICIES = ("hecate", "fastermoe", "flexmoe")
"""Policies that the planner tries; `fixed` with all experts, too."""
SLOT_RATIO = 4
"""Ratio of the numbers of slots that the planner tries."""


def add_copy_variants(
    run: RunSpec, candidates: Sequence[Candidate], chosen: Candidate, budget: int | None
) -> list[Candidate]:
    """The candidates and the fastest copies and owners of experts for the chosen one and for the fastest with expert ranks."""
    spread = [candidate for candidate in candidates if candidate.simulated and _group(candidate.plan) > 1]
    tried = [chosen, *spread[:1]] if chosen not in spread[:1] else [chosen]
    added = []
    for candidate in tried:
        copies = [plan for plan in copy_variants(run, candidate.plan) if fits(run, plan, budget)]
        variants = [min(copies, key=lambda plan: _stage_seconds(run, plan))] if copies else []
        variants += [variant for plan in (candidate.plan, *variants) for variant in owner_variants(run, plan)]
        if variants:
            fastest = min(variants, key=lambda plan: _stage_seconds(run, plan))
            kept = [plan for plan in _with_keep(run, fastest) if fits(run, plan, budget)]
            fastest = min((fastest, *kept), key=lambda plan: _stage_seconds(run, plan))
            added.append(replace(candidate, plan=reprice(run, fastest), simulated=True, estimated=None))
    if not added:
        return list(candidates)
    return sorted([*candidates, *added], key=lambda candidate: (not candidate.simulated, candidate.seconds))


def copy_variants(run: RunSpec, plan: Plan) -> Iterator[Plan]:
    """`plan` with each policy and number of slots that the run's pins allow.

    None without recorded loads, or if a policy is pinned. Slots are one, four and so on up to all experts of other ranks. Weights are not
    kept for the step unless that is pinned.
    """
    pins, ranks = pins_of(run), _group(plan)
    if (
        run.model.adapter
        or plan.experts is None
        or ranks == 1
        or pins.expert_policy is not None
        or copies_experts(plan)
    ):
        return
    if run.train.expert_load in (None, EQUAL_LOADS):
        return
    others = run.model.experts - run.model.experts // ranks
    sizes = sorted({min(others, SLOT_RATIO**power) for power in range(others.bit_length() + 1)})
    window, keep = pins.expert_window or ExpertPlan(expert=1).window, bool(pins.expert_keep)
    for slots in sizes if pins.expert_slots is None else (pins.expert_slots,):
        for policy in (*POLICIES, *(("fixed",) if slots == others and not plan.paired else ())):
            yield replace(plan, experts=replace(plan.experts, policy=policy, slots=slots, keep=keep, window=window))


def owner_variants(run: RunSpec, plan: Plan) -> Iterator[Plan]:
    """`plan` with owners that follow the loads; none without recorded loads, if owners are pinned, and where they cannot move."""
    model, pins = run.model, pins_of(run)
    if (
        run.model.adapter
        or plan.experts is None
        or _group(plan) == 1
        or pins.expert_owners is not None
        or plan.experts.policy == "fixed"
    ):
        return
    if run.train.expert_load in (None, EQUAL_LOADS) or model.groups_per_token < model.expert_groups:
        return
    window = pins.expert_window or plan.experts.window
    variant = replace(plan, experts=replace(plan.experts, owners="heterogeneous", window=window))
    if untrainable(plan) or not untrainable(variant):
        yield variant


def _with_keep(run: RunSpec, plan: Plan) -> Iterator[Plan]:
    """`plan` with copies that are kept for the step, if the run does not pin that."""
    if plan.experts is not None and plan.experts.policy != "none" and pins_of(run).expert_keep is None:
        yield replace(plan, experts=replace(plan.experts, keep=True))


def _group(plan: Plan) -> int:
    """Ranks that share the experts of a layer."""
    return experts_over(plan) * plan.axis_size("tensor")


def _stage_seconds(run: RunSpec, plan: Plan) -> float:
    predicted = reprice(run, plan, by_units=False).predicted
    return float("inf") if predicted is None or predicted.step_seconds is None else predicted.step_seconds
