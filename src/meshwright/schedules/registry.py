"""All schedules by name, with the sizes that they support and their peak memory. A new schedule needs an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.schedules.looping import breadth_first, groups_of, interleaved
from meshwright.schedules.one_stage import gpipe, one_f_one_b, paired, zb_h1
from meshwright.schedules.schedule import ComputeOrder, Schedule, trained
from meshwright.schedules.vee import zbv
from meshwright.spec.errors import BadInput, nearest


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How a schedule is built, the sizes that it supports, and the published bound of its memory.

    `order(ranks, micro_batches, stages_per_rank)` returns its compute order.
    `in_flight(ranks, rank, micro_batches, stages_per_rank)` returns an upper bound of the forwards of stages whose
    activations the rank holds at a time.
    `stages_per_rank`: the supported numbers of stages per rank.
    `pairs`: two micro-batches run together, on one rank.
    """

    order: Callable[[int, int, int], ComputeOrder]
    in_flight: Callable[[int, int, int, int], int]
    stages_per_rank: range
    pairs: bool = False


# Numbers of stages per rank.
ANY_NUMBER = range(1, 1 << 20)
ONE_STAGE = range(1, 2)
TWO_STAGES = range(2, 3)

SCHEDULES: dict[str, Entry] = {
    "gpipe": Entry(
        order=lambda ranks, micro_batches, _: gpipe(ranks, micro_batches),
        in_flight=lambda ranks, rank, micro_batches, _: micro_batches,
        stages_per_rank=ONE_STAGE,
    ),
    "1f1b": Entry(
        order=lambda ranks, micro_batches, _: one_f_one_b(ranks, micro_batches),
        in_flight=lambda ranks, rank, micro_batches, _: min(micro_batches, ranks - rank),
        stages_per_rank=ONE_STAGE,
    ),
    "interleaved": Entry(
        order=interleaved,
        in_flight=lambda ranks, rank, micro_batches, stages: min(
            micro_batches * stages, 2 * (ranks - 1 - rank) + (stages - 1) * len(groups_of(ranks, micro_batches)[0]) + 1
        ),
        stages_per_rank=ANY_NUMBER[1:],
    ),
    "zb_h1": Entry(
        order=lambda ranks, micro_batches, _: zb_h1(ranks, micro_batches),
        in_flight=lambda ranks, rank, micro_batches, _: min(micro_batches, ranks),
        stages_per_rank=ONE_STAGE,
    ),
    "zbv": Entry(
        order=lambda ranks, micro_batches, _: zbv(ranks, micro_batches),
        in_flight=lambda ranks, rank, micro_batches, _: 2 * min(micro_batches, ranks),
        stages_per_rank=TWO_STAGES,
    ),
    "breadth_first": Entry(
        order=breadth_first,
        in_flight=lambda ranks, rank, micro_batches, stages: micro_batches * stages,
        stages_per_rank=ANY_NUMBER,
    ),
    "paired": Entry(
        order=lambda ranks, micro_batches, _: paired(micro_batches),
        in_flight=lambda ranks, rank, micro_batches, _: 2,
        stages_per_rank=ONE_STAGE,
        pairs=True,
    ),
}
"""All training schedules. `looping.forward_only` runs a validation on the placement of any of them."""


def build(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> Schedule:
    """Build the schedule `name`, by default with the fewest stages per rank. Raises BadInput for unsupported sizes."""
    return trained(name, micro_batches, *order_of(name, ranks, micro_batches, stages_per_rank))


def order_of(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> ComputeOrder:
    """Return the order of forwards and backwards, without transfers. Raises BadInput like `build`."""
    entry = entry_of(name)
    stages = entry.stages_per_rank.start if stages_per_rank is None else stages_per_rank
    if refused := refusal(name, ranks, micro_batches, stages):
        raise BadInput(refused)
    return entry.order(ranks, micro_batches, stages)


def entry_of(name: str) -> Entry:
    """Return the entry of the schedule `name`. Raises BadInput with the nearest name if there is none."""
    if name not in SCHEDULES:
        near = nearest(name, SCHEDULES)
        hint = f"; nearest: {near}" if near else ""
        raise BadInput(f"unknown schedule {name!r}; expected one of {', '.join(SCHEDULES)}{hint}")
    return SCHEDULES[name]


def refusal(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> str | None:
    """Return why the schedule does not support these sizes, with the nearest supported ones; None if it does."""
    entry = entry_of(name)
    for quantity, value in (
        ("pipeline ranks", ranks),
        ("micro-batches", micro_batches),
        ("stages per rank", stages_per_rank),
    ):
        if value < 1:
            return f"schedule {name}: {quantity} must be at least 1, got {value}; nearest: 1"
    allowed = entry.stages_per_rank
    if stages_per_rank not in allowed:
        near = min(max(stages_per_rank, allowed.start), allowed.stop - 1)
        required = f"exactly {near}" if len(allowed) == 1 else f"at least {allowed.start}"
        return f"schedule {name} has {required} stages per rank, got {stages_per_rank}; nearest: {near}"
    if entry.pairs and ranks > 1:
        return f"schedule {name} runs on one pipeline rank, got {ranks}; nearest: 1"
    if entry.pairs and micro_batches % 2:
        return (
            f"schedule {name} needs an even number of micro-batches, got {micro_batches}; nearest: {micro_batches + 1}"
        )
    return None
