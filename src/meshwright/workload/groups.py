"""Sizes of a plan's groups of ranks."""

from __future__ import annotations

from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan


def context_size(plan: Plan) -> int:
    """Context ranks: the number of parts of one sequence."""
    return plan.axis_size("context_ring") * plan.axis_size("context_ulysses")


def shard_size(plan: Plan) -> int:
    """Ranks over which parameters, gradients and optimizer state are sharded: shard or hybrid axis times context ranks.

    4 shard ranks times 2 context ranks:

    >>> from meshwright.spec.plan import BatchPlan, MeshAxis
    >>> axes = (MeshAxis(axis="shard", size=4), MeshAxis(axis="context_ring", size=2))
    >>> shard_size(Plan(mesh=axes, batch=BatchPlan(global_batch=4, micro_batch=1, accumulate=1)))
    8
    """
    return plan.axis_size("shard") * plan.axis_size("hybrid") * context_size(plan)


def gathers_weights(plan: Plan) -> bool:
    """Whether a rank computes with copies of its stored weights, which `reshard` frees: gathered from shards, or cast on one rank."""
    return shard_size(plan) > 1 or plan.precision.compute != plan.precision.stored


def experts_over(plan: Plan) -> int:
    """Expert ranks among the ranks that share one tensor rank's weights."""
    return plan.experts.expert if plan.experts else 1


def copies_experts(plan: Plan) -> bool:
    """Whether experts of other ranks are present on a rank."""
    return plan.experts is not None and plan.experts.policy != "none"


def moves_experts(plan: Plan) -> bool:
    """Whether expert placement follows the loads."""
    return plan.experts is not None and plan.experts.placement != "even"


def stacked_experts(model: ModelSpec, plan: Plan) -> int:
    """Experts of a layer for which a rank has space, its own and copies."""
    own = model.experts // (experts_over(plan) * plan.axis_size("tensor"))
    return own if plan.experts is None else min(own + plan.experts.slots, model.experts)


def all_present(model: ModelSpec, plan: Plan) -> bool:
    """Whether each rank has all experts in every step, whatever the loads are."""
    fixed = plan.experts is not None and plan.experts.policy == "fixed"
    return fixed and stacked_experts(model, plan) == model.experts
