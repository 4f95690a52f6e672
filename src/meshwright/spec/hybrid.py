"""What hybrid ranks require of the model and of the other axes.

Hybrid ranks read different samples, and any number of them can divide a long sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import CONTEXT_AXES, AxisName, Plan

REFUSED_BESIDE: tuple[AxisName, ...] = ("shard", "replicate", *CONTEXT_AXES)
"""Axes that must have one rank if there are hybrid ranks."""
SCHEDULES = ("1f1b", "breadth_first")
"""Schedules of hybrid ranks without pipelines."""
PIPELINE_SCHEDULES = (*SCHEDULES, "gpipe", "interleaved", "zb_h1", "zbv")
"""Schedules of hybrid ranks with pipelines: those that support any number of micro-batches."""
Numbering = Literal["own", "common", "equal"]
"""How data ranks number the slots of a step. A slot is the space for one micro-batch of a rank.

own: each rank counts from 0. common: all ranks use one order of slots (`policies.slot_order`), and a rank leaves out
the numbers for which it has no slot. equal: the same, but a rank has an empty slot for each number that it would leave
out.
"""


def hybrid_error(sizes: Mapping[str, int], *, windowed: bool, by_length: bool, altered_scores: bool) -> str | None:
    """Return the first requirement of hybrid ranks that is not met, as text; None if all are met.

    `sizes` are the numbers of ranks of other axes. `windowed`: some layers attend to a window. `by_length`: their
    rotation depends on the length of a sequence (LongRoPE). `altered_scores`: attention has sinks or caps.
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


def model_error(spec: ModelSpec, sizes: Mapping[str, int] | None = None) -> str | None:
    """Return `hybrid_error` of a model, with other axes of these sizes."""
    return hybrid_error(
        sizes or {},
        windowed=spec.windowed,
        by_length=spec.longrope is not None,
        altered_scores=spec.sinks or spec.score_cap is not None,
    )


def schedules_of(pipeline: int) -> tuple[str, ...]:
    """Return the schedules of hybrid ranks, each with `pipeline` pipeline ranks."""
    return PIPELINE_SCHEDULES if pipeline > 1 else SCHEDULES


def slot_numbering(plan: Plan) -> Numbering:
    """Return how the data ranks of a plan number their slots.

    Expert ranks exchange tokens in every slot, so all of them must have the same number of slots.
    """
    if plan.axis_size("hybrid") == 1 or (plan.experts is not None and plan.experts.expert > 1):
        return "equal"
    return "own" if plan.axis_size("pipeline") == 1 else "common"


def capacity_error(capacity: int, ranks: int, tensor: int, longest: int, longer: int = 0) -> tuple[str, int] | None:
    """Return (what is required of a slot of `capacity` tokens, the nearest valid capacity); None if it is valid.

    `ranks` hybrid ranks together must hold the longest sample of `longest` tokens, in slots with offload of `longer`
    tokens if there are such slots. `tensor` ranks divide a slot.
    """
    unit = math.lcm(2, tensor)
    if max(capacity, longer) * ranks < longest:
        share = f" ÷ {ranks} hybrid ranks" if ranks > 1 else ""
        return f"at least the longest sample, train.seq_len = {longest}{share}", least_capacity(ranks, tensor, longest)
    if capacity % unit:
        return "an even number of tokens" if unit == 2 else f"a multiple of {unit} tokens", -(-capacity // unit) * unit
    return None


def least_capacity(ranks: int, tensor: int, longest: int) -> int:
    """Return the tokens of the smallest slots in which `ranks` hybrid ranks together hold a sample of `longest` tokens."""
    unit = math.lcm(2, tensor)
    return -(-longest // (ranks * unit)) * unit


def exchanged_heads(kv_heads: int, tensor: int) -> int:
    """Return the number of key/value heads of a rank.

    Ranks that divide a sample may exchange tokens for heads if their number divides it.
    """
    return max(1, kv_heads // tensor)


def keeps_weights(plan: Plan) -> bool:
    """Return whether no micro-batch of a plan needs a collective of its own.

    This is so if units stay gathered, or in layered order, where all micro-batches run through a unit before the next unit.
    """
    return plan.layered or all(not layer.reshard and layer.gradients == "whole" for layer in plan.layers)
