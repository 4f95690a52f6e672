"""Requirements of the hybrid axis on the model and on the other axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from meshwright.spec.plan import CONTEXT_AXES, AxisName, Plan

REFUSED_BESIDE: tuple[AxisName, ...] = ("shard", "replicate", *CONTEXT_AXES)
"""Axes that cannot have several ranks beside the hybrid axis."""
SCHEDULES = ("1f1b", "breadth_first")
"""Schedules of hybrid ranks without pipelines."""
PIPELINE_SCHEDULES = (*SCHEDULES, "gpipe", "interleaved", "zb_h1", "zbv")
"""Schedules of hybrid ranks that are pipelines: those for any number of micro-batches."""
Numbering = Literal["own", "common", "equal"]
"""How data ranks count their slots of a step.

own: each from 0. common: in one order of all ranks (`policies.slot_order`), in which ranks leave numbers out. equal: the same, with empty
slots for the numbers left out.
"""


def hybrid_error(sizes: Mapping[str, int], *, windowed: bool, by_length: bool, altered_scores: bool) -> str | None:
    """Return the first unmet requirement of hybrid ranks, in words; None if all are met.

    `sizes` are those of the other axes, `windowed` tells whether layers of the model attend to a window, `by_length` whether their
    rotation depends on the length of a sequence (LongRoPE), `altered_scores` whether attention has sinks or caps.
    """
    other = next((axis for axis in REFUSED_BESIDE if sizes.get(axis, 1) > 1), None)
    if other is not None:
        return f"no {other} ranks beside it: hybrid ranks take the place of shard and context ranks"
    if windowed:
        return "model.sliding_window = none in all layers beside it: a divided sample attends to all its tokens"
    if by_length:
        return "model.longrope = none beside it: its divisors follow from the length, and slots have other lengths than samples"
    if altered_scores:
        return "model.sinks = false and model.score_cap = none beside it: the parts of a divided sample have neither"
    return None


def schedules_of(pipeline: int) -> tuple[str, ...]:
    """Schedules of hybrid ranks with this number of pipeline ranks each."""
    return PIPELINE_SCHEDULES if pipeline > 1 else SCHEDULES


def slot_numbering(plan: Plan) -> Numbering:
    """How data ranks of a plan count their slots: expert ranks exchange tokens in each, so they have equally many."""
    if plan.axis_size("hybrid") == 1 or (plan.experts is not None and plan.experts.expert > 1):
        return "equal"
    return "own" if plan.axis_size("pipeline") == 1 else "common"


def capacity_error(capacity: int, ranks: int, tensor: int, longest: int, longer: int = 0) -> tuple[str, int] | None:
    """Return the unmet requirement of a slot of `capacity` tokens and the nearest valid capacity; None if it is valid.

    `ranks` hybrid ranks hold the longest sample together, in slots with offload of `longer` tokens if there are any, and `tensor` ranks
    divide a slot.
    """
    unit = math.lcm(2, tensor)
    if max(capacity, longer) * ranks < longest:
        share = f" ÷ {ranks} hybrid ranks" if ranks > 1 else ""
        return f"at least the longest sample, train.seq_len = {longest}{share}", least_capacity(ranks, tensor, longest)
    if capacity % unit:
        return "an even number of tokens" if unit == 2 else f"a multiple of {unit} tokens", -(-capacity // unit) * unit
    return None


def least_capacity(ranks: int, tensor: int, longest: int) -> int:
    """Tokens of the smallest slots in which `ranks` hybrid ranks hold the longest sample."""
    unit = math.lcm(2, tensor)
    return -(-longest // (ranks * unit)) * unit


def exchanged_heads(kv_heads: int, tensor: int) -> int:
    """Key/value heads of a rank: ranks of a divided sample whose number divides them may exchange tokens for heads."""
    return max(1, kv_heads // tensor)


def keeps_weights(plan: Plan) -> bool:
    """Whether no micro-batch of a plan has a collective of its own: units stay gathered, or run in layered order."""
    return plan.layered or all(not layer.reshard and layer.gradients == "whole" for layer in plan.layers)
