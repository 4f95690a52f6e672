"""Sizes of the groups of ranks in a plan, and questions about its experts."""

from __future__ import annotations

from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan


def context_size(plan: Plan) -> int:
    """Return the number of context ranks: into how many parts a sequence is divided."""
    return plan.axis_size("context_ring") * plan.axis_size("context_ulysses")


def shard_size(plan: Plan) -> int:
    """Return the number of ranks over which parameters, gradients and optimizer state are sharded.

    It is the size of the shard or hybrid axis times the number of context ranks. 4 shard ranks times 2 context ranks:

    >>> from meshwright.spec.plan import BatchPlan, MeshAxis
    >>> axes = (MeshAxis(axis="shard", size=4), MeshAxis(axis="context_ring", size=2))
    >>> shard_size(Plan(mesh=axes, batch=BatchPlan(global_batch=4, micro_batch=1, accumulate=1)))
    8
    """
    return plan.axis_size("shard") * plan.axis_size("hybrid") * context_size(plan)


def gathers_weights(plan: Plan) -> bool:
    """Return whether a rank computes with temporary copies of its stored weights, which `reshard` frees.

    The copies are gathered from the shards, or on a single rank cast to the compute dtype.
    """
    return shard_size(plan) > 1 or plan.precision.compute != plan.precision.stored


def experts_over(plan: Plan) -> int:
    """Return the number of expert ranks that divide the experts of one tensor rank; 1 if experts are not divided."""
    return plan.experts.expert if plan.experts else 1


def copies_experts(plan: Plan) -> bool:
    """Return whether a rank may also have copies of other ranks' experts."""
    return plan.experts is not None and plan.experts.policy != "none"


def moves_experts(plan: Plan) -> bool:
    """Return whether experts are placed on ranks according to their loads."""
    return plan.experts is not None and plan.experts.placement != "even"


def stacked_experts(model: ModelSpec, plan: Plan) -> int:
    """Return for how many experts of a layer a rank has memory: its own experts, and copies of other ranks' experts."""
    own = model.experts // (experts_over(plan) * plan.axis_size("tensor"))
    return own if plan.experts is None else min(own + plan.experts.slots, model.experts)


def all_present(model: ModelSpec, plan: Plan) -> bool:
    """Return whether each rank has all experts in every step, whatever the loads are."""
    fixed = plan.experts is not None and plan.experts.policy == "fixed"
    return fixed and stacked_experts(model, plan) == model.experts
