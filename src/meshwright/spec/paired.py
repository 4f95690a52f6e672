"""Conflicts of the schedule `paired` with other settings of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.spec.plan import PARTIAL_RECOMPUTES, RECOMPUTES_PRODUCTS, Plan

NO_EXCHANGE = "no tokens go to experts of other ranks"
SAMPLES_DIFFER = "its micro-batches would be filled differently by samples of any length (data.packing: none)"


def paired_conflict(
    *, pipeline: int, exchange: str | None, recompute: Iterable[str | None], offload: Iterable[str | None]
) -> str | None:
    """Return why two micro-batches cannot run together, as the end of a sentence; None if they can, or if it is not known."""
    if pipeline > 1:
        return "it needs plan.pipeline 1"
    if exchange not in (None, "all_to_all"):
        return f"exchange {exchange} sends the tokens of one micro-batch at a time"
    if mode := next((mode for mode in recompute if mode in RECOMPUTES_PRODUCTS), None):
        return f"recompute {mode} would exchange tokens again (none and {', '.join(PARTIAL_RECOMPUTES - RECOMPUTES_PRODUCTS)} do not)"
    if place := next((place for place in offload if place in ("activations", "both")), None):
        return f"offload {place} copies the activations of one micro-batch at a time"
    return None


def plan_conflict(plan: Plan) -> str | None:
    """`paired_conflict` of a plan with the schedule; None for other schedules."""
    if not plan.paired:
        return None
    if plan.experts is None or plan.experts.expert * plan.axis_size("tensor") == 1:
        return NO_EXCHANGE
    if plan.samples is not None:
        return SAMPLES_DIFFER
    values: dict[str, Any] = {
        name: [getattr(layer, name) for layer in plan.layers] for name in ("recompute", "offload")
    }
    return paired_conflict(pipeline=plan.axis_size("pipeline"), exchange=plan.experts.exchange, **values)
