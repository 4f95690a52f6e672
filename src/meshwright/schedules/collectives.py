"""Gathers of parameters and reductions of gradients, put among one rank's unit actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from meshwright.schedules.action import COMPUTE, Action

Gather = Literal["never", "step", "stretch"]
"""never: every rank has the unit's parameters whole. step: gathered at their first use and kept until their last (FSDP
without resharding, ZeRO-2). stretch: dropped after every stretch of use and gathered again (FSDP with resharding, ZeRO-3)."""
Reduce = Literal["never", "once", "stretch"]
"""never: one replica alone. once: summed over ranks after the unit's last backward of the step; the whole gradient is held
until then. stretch: after every stretch of backward, so that only a shard of the gradient is held between."""

Unit = tuple[int, int]
"""(stage, unit)."""


def with_collectives(
    actions: Sequence[Action], gather: Sequence[Sequence[Gather]], reduce: Sequence[Sequence[Reduce]]
) -> tuple[Action, ...]:
    """`actions` with unshard, reshard and reduce_grad among them. Sends go before them: another rank waits for those."""
    before, after = _gathers(actions, gather)
    for place, unit in _reductions(actions, reduce):
        after[place].append(Action("reduce_grad", unit[0], unit=unit[1]))
    result: list[Action] = []
    held_back: list[Action] = []
    for place, action in enumerate(actions):
        if action.kind != "send":
            result += held_back
            held_back = []
        result += before[place]
        result.append(action)
        held_back += after[place]
    return tuple(result + held_back)


def _gathers(
    actions: Sequence[Action], gather: Sequence[Sequence[Gather]]
) -> tuple[dict[int, list[Action]], dict[int, list[Action]]]:
    """By place: the unshards to issue before the action there, and the reshards after it."""
    uses = [(place, _used(action)) for place, action in enumerate(actions) if _used(action)]
    stretches = _stretches([units for _, units in uses])
    begin = _begins(stretches, len(uses))
    kept = [
        (first, last, unit)
        for unit, natural in stretches.items()
        for first, last in _as_kept(natural, gather[unit[0]][unit[1]])
    ]
    before: dict[int, list[Action]] = defaultdict(list)
    after: dict[int, list[Action]] = defaultdict(list)
    dropped: dict[Unit, int] = defaultdict(int)
    for first, last, (stage, unit) in sorted(kept):
        # An overlap uses two units, so the stretch before may have begun while this unit was still gathered.
        issue = uses[max(begin[first - 1], dropped[stage, unit])][0] if first else 0
        before[issue].append(Action("unshard", stage, unit=unit))
        after[uses[last][0]].append(Action("reshard", stage, unit=unit))
        dropped[stage, unit] = last + 1
    return before, after


def _as_kept(natural: list[tuple[int, int]], gather: Gather) -> list[tuple[int, int]]:
    """The stretches over which a unit stays gathered."""
    if gather == "never":
        return []
    return natural if gather == "stretch" else [(natural[0][0], natural[-1][1])]


def _reductions(actions: Sequence[Action], reduce: Sequence[Sequence[Reduce]]) -> list[tuple[int, Unit]]:
    """Where to reduce which unit: the place of the backward it follows."""
    makes = [(place, _made(action)) for place, action in enumerate(actions) if _made(action)]
    stretches = _stretches([units for _, units in makes])
    ends = {unit: [last for _, last in found] for unit, found in stretches.items()}
    chosen = {"never": slice(0), "once": slice(-1, None), "stretch": slice(None)}
    return [
        (makes[last][0], (stage, unit))
        for (stage, unit), lasts in ends.items()
        for last in lasts[chosen[reduce[stage][unit]]]
    ]


def _used(action: Action) -> tuple[Unit, ...]:
    """Units whose parameters the action multiplies with; the weight half of a backward needs none."""
    if action.kind not in COMPUTE:
        return ()
    return tuple((part.stage, part.unit or 0) for part in action.parts if part.kind != "backward_weight")


def _made(action: Action) -> tuple[Unit, ...]:
    """Units whose gradients the action adds to."""
    if action.kind not in COMPUTE:
        return ()
    return tuple((p.stage, p.unit or 0) for p in action.parts if p.kind in ("backward", "backward_weight"))


def _stretches(uses: Sequence[tuple[Unit, ...]]) -> dict[Unit, list[tuple[int, int]]]:
    """By unit, the (first, last) index of each stretch of uses that follow one another."""
    found: dict[Unit, list[tuple[int, int]]] = defaultdict(list)
    for index, units in enumerate(uses):
        for unit in units:
            mine = found[unit]
            if mine and mine[-1][1] >= index - 1:
                mine[-1] = mine[-1][0], index
            else:
                mine.append((index, index))
    return found


def _begins(stretches: dict[Unit, list[tuple[int, int]]], count: int) -> list[int]:
    """For each use, where the stretch it belongs to began (the later one when it uses two units)."""
    begin = [0] * count
    for mine in stretches.values():
        for first, last in mine:
            for index in range(first, last + 1):
                begin[index] = max(begin[index], first)
    return begin
