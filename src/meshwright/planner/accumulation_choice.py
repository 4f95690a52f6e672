"""Plans with sums of gradients over micro-batches in host memory, for the search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.planner.candidate import pins_of
from meshwright.spec.plan import RECOMPUTE_MODES, Plan
from meshwright.spec.run import RunSpec


def plans_with_sums_on_host(run: RunSpec, plan: Plan) -> Iterator[Plan]:
    """The plan with gradient sums in host memory and less recomputation, which the freed memory may allow."""
    pins = pins_of(run)
    if pins.recompute is not None or pins.layers is not None or not _may_move_sums(run, plan):
        return
    last = plan.layers[-1]
    for mode in RECOMPUTE_MODES[: RECOMPUTE_MODES.index(last.recompute)]:
        yield replace(plan, accumulation="host", layers=(replace(last, range="all", recompute=mode),))


def with_and_without_sums(run: RunSpec, plan: Plan) -> list[Plan]:
    """The plan, and the plan with gradient sums in host memory where its pins allow that."""
    return [plan, replace(plan, accumulation="host")] if _may_move_sums(run, plan) else [plan]


def _may_move_sums(run: RunSpec, plan: Plan) -> bool:
    """Whether sums may be moved: no pin decides, devices have memory of their own, and the plan sums shards."""
    unpinned = pins_of(run).accumulation is None and not run.cluster.is_cpu
    return unpinned and any(map(plan.sums_shards, plan.layers))
