"""Sizes of a plan's groups of ranks."""

from __future__ import annotations

from meshwright.spec.plan import Plan


def context_size(plan: Plan) -> int:
    """Context ranks: the number of parts of one sequence."""
    return plan.axis_size("context_ring") * plan.axis_size("context_ulysses")


def shard_size(plan: Plan) -> int:
    """Ranks over which parameters, gradients and optimizer state are sharded: shard axis times context ranks."""
    return plan.axis_size("shard") * context_size(plan)


def experts_over(plan: Plan) -> int:
    """Expert ranks among the ranks that share one tensor rank's weights."""
    return plan.experts.expert if plan.experts else 1
