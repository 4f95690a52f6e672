"""Options of a plan with experts whose gain depends on recorded loads: copies of experts, keeping the copies, and
expert placement.

Each function that yields plans has the arguments of a `Move`: the run, the plan to change, and the memory of a device
in bytes or None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.planner.candidate import pins_of, untrainable
from meshwright.spec.job import EQUAL_LOADS
from meshwright.spec.plan import ExpertPlan, Plan
from meshwright.spec.run import RunSpec
from meshwright.workload.groups import copies_experts, experts_over

SLOT_RATIO = 4
"""Ratio of one tried number of slots to the next: 1, 4, 16, …"""


def copies(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """Yield `plan` with copies of busy experts, for each number of slots that the pins allow.

    Nothing is yielded without recorded loads.

    A slot is memory for one copied expert. The numbers of slots are 1, 4, 16, … up to the number of all experts of
    other ranks. With that last number, fixed copies of all experts are also yielded. The copied weights are kept for
    the whole step only if that is pinned.
    """
    pins = pins_of(run)
    if plan.experts is None or not _spread_by_loads(run, plan) or copies_experts(plan):
        return
    others = run.model.experts - run.model.experts // _group(plan)
    all_sizes = sorted({min(others, SLOT_RATIO**power) for power in range(others.bit_length() + 1)})
    sizes = all_sizes if pins.expert_slots is None else [pins.expert_slots]
    window = pins.expert_load_window or ExpertPlan(expert=1).load_window
    keep = bool(pins.expert_keep)
    for slots in sizes:
        policies = ("hecate", "fixed") if slots == others and not plan.paired else ("hecate",)
        for policy in policies:
            yield replace(
                plan, experts=replace(plan.experts, policy=policy, slots=slots, keep=keep, load_window=window)
            )


def owners(run: RunSpec, plan: Plan, budget: int | None) -> Iterator[Plan]:
    """Yield `plan` with expert placement by loads.

    Nothing is yielded without recorded loads, or if experts cannot move in this plan.
    """
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
    """Yield `plan` with copies that are kept for the whole step."""
    if plan.experts is not None and plan.experts.policy != "none" and not plan.experts.keep:
        yield replace(plan, experts=replace(plan.experts, keep=True))


def copies_text(plan: Plan) -> str:
    """Return a text with the policy and the slots of copied experts."""
    if plan.experts is None or plan.experts.policy == "none":
        return "none"
    return f"{plan.experts.policy}, at most {plan.experts.slots} a rank" + ", kept for the step" * plan.experts.keep


def placement_text(plan: Plan) -> str:
    """Return the expert placement of the plan as a word."""
    return plan.experts.placement if plan.experts else "even"


def _spread_by_loads(run: RunSpec, plan: Plan) -> bool:
    """Return whether several ranks divide the trained experts of a layer, and recorded loads are known."""
    recorded = run.train.expert_load not in (None, EQUAL_LOADS)
    return recorded and run.model.adapter is None and _group(plan) > 1


def _group(plan: Plan) -> int:
    """Return the number of ranks that divide the experts of a layer."""
    return experts_over(plan) * plan.axis_size("tensor")
