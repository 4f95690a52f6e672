"""Inserts gathers of parameters and reductions of gradients into one rank's unit actions.

A unit is a set of parameters that FSDP gathers and reduces together: the embedding, a block, or norm and head. A stretch is
a sequence of consecutive compute actions that use the same unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from meshwright.schedules.action import COMPUTE, Action

Gather = Literal["never", "start", "step", "stretch"]
"""When a unit's parameters are gathered:

never     Every rank has them as a whole.
step      Before the first use of the step; they are kept until the last use (FSDP without resharding, ZeRO-2).
start     Like `step`, but before the rank's first action, so that ranks may run different numbers of micro-batches.
stretch   Before each stretch; they are freed after it (FSDP with resharding, ZeRO-3).
"""
Reduce = Literal["never", "end", "once", "stretch"]
"""When a unit's gradients are reduced:

never     Not at all: there is one replica.
once      After the unit's last backward of the step. The rank keeps the whole gradient until then.
end       Like `once`, but after the last backward of all units.
stretch   After each stretch of backwards. The rank keeps only its shard of the gradient in between.
"""

Unit = tuple[int, int]
"""(stage, index of the unit in the stage)."""


def with_collectives(
    actions: Sequence[Action], gather: Sequence[Sequence[Gather]], reduce: Sequence[Sequence[Reduce]]
) -> tuple[Action, ...]:
    """Return `actions` with unshard, reshard and reduce_grad actions inserted.

    After a compute action its sends come first, because another rank waits for the payload.
    """
    before, after = _gathers(actions, gather)
    for index, unit in _reductions(actions, reduce):
        after[index].append(Action("reduce_grad", unit[0], unit=unit[1]))
    result: list[Action] = []
    after_sends: list[Action] = []
    for index, action in enumerate(actions):
        if action.op != "send":
            result += after_sends
            after_sends = []
        result += before[index]
        result.append(action)
        after_sends += after[index]
    return tuple(result + after_sends)


def _gathers(
    actions: Sequence[Action], gather: Sequence[Sequence[Gather]]
) -> tuple[dict[int, list[Action]], dict[int, list[Action]]]:
    """Return two tables by action index: the unshards to issue before the action, and the reshards after it."""
    uses = [(index, unit) for index, action in enumerate(actions) if (unit := _unit_read(action)) is not None]
    stretches = _stretches([unit for _, unit in uses])
    # From the index of a stretch's last use to that of its first.
    start_of_stretch = {last: first for spans in stretches.values() for first, last in spans}
    gathered = [
        (first, last, unit)
        for unit, spans in stretches.items()
        for first, last in _gathered_spans(spans, gather[unit[0]][unit[1]])
    ]
    before: dict[int, list[Action]] = defaultdict(list)
    after: dict[int, list[Action]] = defaultdict(list)
    for (stage, unit), spans in stretches.items():
        if gather[stage][unit] == "start":
            before[0].append(Action("unshard", stage, unit=unit))
            after[uses[spans[-1][1]][0]].append(Action("reshard", stage, unit=unit))
    for first, last, (stage, unit) in sorted(gathered):
        # Use first - 1 ends the previous stretch. The gather is issued where that stretch begins.
        issue = uses[start_of_stretch[first - 1]][0] if first else 0
        before[issue].append(Action("unshard", stage, unit=unit))
        after[uses[last][0]].append(Action("reshard", stage, unit=unit))
    return before, after


def _gathered_spans(spans: list[tuple[int, int]], gather: Gather) -> list[tuple[int, int]]:
    """Return the (first, last) uses between which a unit stays gathered, from its stretches of use.

    There are none if the unit is never gathered, or gathered at the start of the step.
    """
    if gather in ("never", "start"):
        return []
    return spans if gather == "stretch" else [(spans[0][0], spans[-1][1])]


def _reductions(actions: Sequence[Action], reduce: Sequence[Sequence[Reduce]]) -> list[tuple[int, Unit]]:
    """Return (index of the backward action before the reduction, unit) for every reduction."""
    writes = [(index, unit) for index, action in enumerate(actions) if (unit := _unit_written(action)) is not None]
    stretches = _stretches([unit for _, unit in writes])
    ends = {unit: [last for _, last in spans] for unit, spans in stretches.items()}
    # Which of a unit's stretches are followed by a reduction.
    reduced_uses = {"never": slice(0), "end": slice(0), "once": slice(-1, None), "stretch": slice(None)}
    reductions = [
        (writes[last][0], (stage, unit))
        for (stage, unit), lasts in ends.items()
        for last in lasts[reduced_uses[reduce[stage][unit]]]
    ]
    return reductions + [(writes[-1][0], (stage, unit)) for stage, unit in ends if reduce[stage][unit] == "end"]


def _unit_read(action: Action) -> Unit | None:
    """Return the unit whose parameters the action reads, or None. The weight half of a backward reads none."""
    return (action.stage, action.unit or 0) if action.op in COMPUTE and action.op != "backward_weight" else None


def _unit_written(action: Action) -> Unit | None:
    """Return the unit to whose gradients the action adds, or None."""
    return (action.stage, action.unit or 0) if action.op in ("backward", "backward_weight") else None


def _stretches(uses: Sequence[Unit]) -> dict[Unit, list[tuple[int, int]]]:
    """Return, for each unit, the (first, last) index of each of its stretches."""
    stretches: dict[Unit, list[tuple[int, int]]] = defaultdict(list)
    for index, unit in enumerate(uses):
        spans = stretches[unit]
        if spans and spans[-1][1] == index - 1:
            spans[-1] = spans[-1][0], index
        else:
            spans.append((index, index))
    return stretches
