"""Options of a plan with experts, where recorded loads determine their gain: copies, their keep, and expert placement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.planner.candidate import pins_of, untrainable
from meshwright.spec.job import EQUAL_LOADS
from meshwright.spec.plan import ExpertPlan, Plan
from meshwright.spec.run import RunSpec
from meshwright.workload.groups import copies_experts, experts_over

SLOT_RATIO = 4
"""Ratio of the numbers of slots that the planner tries."""


def copies(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """`plan` with copies of loaded experts for each number of slots that the run's pins allow; none without recorded loads.

    Slots are one, four and so on up to all experts of other ranks; with all of them, fixed copies are offered too. Weights are not kept
    for the step unless that is pinned.
    """
    pins = pins_of(run)
    if plan.experts is None or not _spread_by_loads(run, plan) or copies_experts(plan):
        return
    others = run.model.experts - run.model.experts // _group(plan)
    sizes = sorted({min(others, SLOT_RATIO**power) for power in range(others.bit_length() + 1)})
    window = pins.expert_load_window or ExpertPlan(expert=1).load_window
    keep = bool(pins.expert_keep)
    for slots in sizes if pins.expert_slots is None else (pins.expert_slots,):
        for policy in ("hecate", *(("fixed",) if slots == others and not plan.paired else ())):
            yield replace(
                plan, experts=replace(plan.experts, policy=policy, slots=slots, keep=keep, load_window=window)
            )


def owners(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """`plan` with owners that follow the loads; none without recorded loads, and where owners cannot move."""
    model = run.model
    pins = pins_of(run)
    if plan.experts is None or not _spread_by_loads(run, plan) or plan.experts.policy == "fixed":
        return
    if model.groups_per_token < model.expert_groups or plan.experts.placement != "even":
        return
    window = pins.expert_load_window or plan.experts.load_window
    variant = replace(plan, experts=replace(plan.experts, placement="balanced", load_window=window))
    if untrainable(plan) or not untrainable(variant):
        yield variant


def kept_copies(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """`plan` with copies that are kept for the step."""
    if plan.experts is not None and plan.experts.policy != "none" and not plan.experts.keep:
        yield replace(plan, experts=replace(plan.experts, keep=True))


def copies_text(plan: Plan) -> str:
    """Policy and slots of copies of experts."""
    if plan.experts is None or plan.experts.policy == "none":
        return "none"
    return f"{plan.experts.policy}, at most {plan.experts.slots} a rank" + ", kept for the step" * plan.experts.keep


def placement_text(plan: Plan) -> str:
    return plan.experts.placement if plan.experts else "even"


def _spread_by_loads(run: RunSpec, plan: Plan) -> bool:
    """Whether several ranks share the trained experts of a layer, and recorded loads say which."""
    recorded = run.train.expert_load not in (None, EQUAL_LOADS)
    return recorded and run.model.adapter is None and _group(plan) > 1


def _group(plan: Plan) -> int:
    """Ranks that share the experts of a layer."""
    return experts_over(plan) * plan.axis_size("tensor")
