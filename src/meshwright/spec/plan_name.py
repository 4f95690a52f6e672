"""Names of plans in common terms: PP, FSDP, HSDP, DDP, CP, TP, EP and ZeRO stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal

from meshwright.spec.plan import AxisName, LayerStrategy, Plan, ScheduleName

SCHEDULE_NAMES: dict[ScheduleName, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb_h1": "zero-bubble H1 (zb_h1)",
    "zbv": "zero-bubble V (zbv)",
    "breadth_first": "layered accumulation (breadth_first)",
    "paired": "paired micro-batches (paired)",
}
"""Common names of the schedules, with the value of `plan.schedule` in parentheses if it differs."""

AXIS_LETTERS: dict[AxisName, str] = {"pipeline": "PP", "tensor": "TP"}
"""Axes that a plan's name shows as letters with their size."""
TERMS: dict[AxisName | Literal["expert"], str] = {
    **AXIS_LETTERS,
    "replicate": "DDP",
    "shard": "FSDP",
    "hybrid": "HDP",
    "context_ring": "CP",
    "context_ulysses": "CP",
    "expert": "EP",
}
"""Common names of axes."""
CONTEXT_NAMES: dict[AxisName, str] = {"context_ring": "ring", "context_ulysses": "Ulysses"}
"""Names of the two kinds of context ranks."""


def plan_name(plan: Plan) -> str:
    """Return layout and micro-batch of a plan: "PP 2 × FSDP 4 (ZeRO-3), zero-bubble V (zbv), micro-batch 1"."""
    return f"{layout_name(plan)}, micro-batch {plan.batch.micro_batch}"


def layout_name(plan: Plan) -> str:
    """Return parallelism and schedule of a plan: "FSDP 8 (ZeRO-3), EP 8" or "PP 2 × FSDP 4 (ZeRO-3), 1F1B"."""
    parts = [mesh_name(plan)]
    if plan.experts is not None and plan.experts.expert > 1:
        parts.append(f"EP {plan.experts.expert}")
    if has_schedule(plan):
        parts.append(SCHEDULE_NAMES[plan.schedule.name])
    return ", ".join(parts)


def has_schedule(plan: Plan) -> bool:
    """Return whether ranks run their micro-batches in another order than one after another."""
    return plan.axis_size("pipeline") > 1 or plan.layered or plan.paired


def axis_with_term(axis: AxisName | Literal["expert"], size: int, where: str = "") -> str:
    """An axis by its key in a plan, its size, its term, and where it is: "shard 8 (FSDP)", "pipeline 2 (PP, between nodes)"."""
    return f"{axis} {size} ({', '.join(filter(None, (TERMS[axis], where)))})"


def mesh_name(plan: Plan) -> str:
    """Return the parallelism of a plan: "PP 2 × FSDP 4 (ZeRO-3)"."""
    return " × ".join(_axes(plan)) or "one device"


def divides_weights(plan: Plan) -> bool:
    """Whether ranks hold parts of the weights, which are gathered for a layer's computation; context ranks share them too."""
    return any(plan.axis_size(axis) > 1 for axis in ("shard", "hybrid", "context_ring", "context_ulysses"))


def zero_stage(layer: LayerStrategy) -> int:
    """Return the ZeRO stage (arXiv 1910.02054) that corresponds to a layer's sharding during a step.

    3 if weights are gathered again for the backward, 2 if they stay gathered, 1 if gradients are not sharded between
    micro-batches either.
    """
    if layer.reshard:
        return 3
    return 1 if layer.gradients == "whole" else 2


def _axes(plan: Plan) -> Iterator[str]:
    """Yield the name of each axis with more than one rank, the outermost first.

    In other frameworks, replicate and shard together are one data axis. Their common name comes at the place of the
    first of them.
    """
    copies = plan.axis_size("replicate")
    shards = plan.axis_size("shard")
    stages = "ZeRO-" + " and ".join(str(stage) for stage in sorted({zero_stage(layer) for layer in plan.layers}))
    data = f"HSDP {copies}×{shards} ({stages})" if copies > 1 else f"FSDP {shards} ({stages})"
    data = data if shards > 1 else f"DDP {copies}"
    # Context ranks divide the sharded states with shard ranks. Without shard ranks, they alone do, so the ZeRO stage
    # is named with them.
    sharing = "" if shards > 1 else f", {stages}"
    for axis in plan.mesh:
        if axis.size == 1:
            continue
        if axis.axis == "hybrid":
            yield f"HDP {axis.size} ({stages})"
        elif axis.axis in CONTEXT_NAMES:
            yield f"CP {axis.size} ({CONTEXT_NAMES[axis.axis]}{sharing})"
            sharing = ""
        elif axis.axis in AXIS_LETTERS:
            yield f"{AXIS_LETTERS[axis.axis]} {axis.size}"
        elif data:
            yield data
            data = ""


def layer_numbers(layers: Collection[int]) -> str:
    """Return layer numbers as text with ranges: `{0, 1, 2, 5}` as "0-2, 5"."""
    starts = sorted(layer for layer in layers if layer - 1 not in layers)
    ends = sorted(layer for layer in layers if layer + 1 not in layers)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
