"""How many ranks share the parts of a model under a plan."""

from __future__ import annotations

from meshwright.spec.plan import Plan


def context_size(plan: Plan) -> int:
    """Ranks that one sequence is split over."""
    return plan.axis_size("context_ring") * plan.axis_size("context_ulysses")


def shard_size(plan: Plan) -> int:
    """Ranks over which parameters, gradients and optimizer are sharded: the shard axis and context ranks."""
    return plan.axis_size("shard") * context_size(plan)


def experts_over(plan: Plan) -> int:
    """Ranks, of those that share one tensor rank's weights, that a layer's experts are spread over."""
    return plan.experts.expert if plan.experts else 1
