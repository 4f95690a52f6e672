"""A schedule as data: the stages of each rank, and the actions of each rank in order.

The functions that build schedules return only the compute order of each rank; `trained` and `evaluated` add the transfers
between ranks and the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwright.schedules.action import COMPUTE, Action
from meshwright.schedules.transfers import in_turns, with_transfers

Placement = tuple[tuple[int, ...], ...]
"""By pipeline rank, its virtual stages in the order a micro-batch visits them."""
ComputeOrder = tuple[Placement, Sequence[Sequence[Action]]]
"""The placement, and by pipeline rank the forwards and backwards in order."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every pipeline rank for one step."""

    name: str
    micro_batches: int
    placement: Placement
    actions: tuple[tuple[Action, ...], ...]
    """By rank, in the order the rank's host issues them."""
    units: tuple[int, ...] | None = None
    """FSDP units of each stage, once `expand` has cut the stages into units."""

    @property
    def ranks(self) -> int:
        return len(self.placement)

    @property
    def stages(self) -> int:
        return sum(map(len, self.placement))

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The rank that holds each stage."""
        return rank_of(self.placement)

    @property
    def channels(self) -> tuple[tuple[int, int], ...]:
        """(sender, receiver) pairs of ranks that exchange messages: one communicator each."""
        return channels(self.placement, forward_only=not self.trains)

    @property
    def trains(self) -> bool:
        """Whether the step ends with the optimizer; false for `forward_only`."""
        return any(action.op == "optim" for action in self.actions[0])

    def compute(self, rank: int) -> tuple[Action, ...]:
        """The rank's compute actions in order, without transfers and collectives."""
        return tuple(action for action in self.actions[rank] if action.op in COMPUTE)

    def in_turns(self) -> Schedule:
        """Return the step with each message exchanged only when its receiver needs it, for a run's first step (`transfers`)."""
        return replace(self, actions=in_turns(self.rank_of, self.actions))

    def only(self, micro_batches: Sequence[int]) -> Schedule:
        """Return the step without the other micro-batches; the remaining ones are counted from 0."""
        numbers = {micro_batch: number for number, micro_batch in enumerate(micro_batches)}
        actions = tuple(
            tuple(kept for action in rank_actions if (kept := _renumbered(action, numbers)) is not None)
            for rank_actions in self.actions
        )
        return replace(self, micro_batches=len(numbers), actions=actions)

    def __str__(self) -> str:
        return "\n".join(f"{rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.actions))


def _renumbered(action: Action, numbers: Mapping[int, int]) -> Action | None:
    """The action with its micro-batch's number in `numbers`; None if it is of another micro-batch."""
    if action.pair:
        parts = [kept for part in action.pair if (kept := _renumbered(part, numbers)) is not None]
        return action._replace(pair=tuple(parts)) if len(parts) == 2 else next(iter(parts), None)
    if action.micro_batch < 0:
        return action
    number = numbers.get(action.micro_batch)
    return None if number is None else action._replace(micro_batch=number)


def looped(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Round-robin placement: stage s on rank s mod `ranks`."""
    return tuple(tuple(range(rank, ranks * stages_per_rank, ranks)) for rank in range(ranks))


def vee(ranks: int) -> Placement:
    """V-shaped placement, two stages per rank: stages go from rank 0 to the last rank and back, so rank 0 has both ends."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def rank_of(placement: Placement) -> tuple[int, ...]:
    """The rank that holds each stage."""
    holders = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    return tuple(holders[stage] for stage in range(len(holders)))


def channels(placement: Placement, *, forward_only: bool = False) -> tuple[tuple[int, int], ...]:
    """(sender, receiver) pairs of ranks that exchange activations and, unless `forward_only`, gradients."""
    down = {pair for pair in pairwise(rank_of(placement)) if pair[0] != pair[1]}
    up = set() if forward_only else {(receiver, sender) for sender, receiver in down}
    return tuple(sorted(down | up))


def trained(name: str, micro_batches: int, placement: Placement, compute: Sequence[Sequence[Action]]) -> Schedule:
    """The schedule of a training step from each rank's order of forwards and backwards."""
    end = (Action("norm_barrier"), Action("optim"))
    actions = with_transfers(rank_of(placement), compute)
    return Schedule(name, micro_batches, placement, tuple(rank_actions + end for rank_actions in actions))


def evaluated(name: str, micro_batches: int, placement: Placement, compute: Sequence[Sequence[Action]]) -> Schedule:
    """The schedule of a pass without backward from each rank's order of `forward_only` actions."""
    return Schedule(name, micro_batches, placement, with_transfers(rank_of(placement), compute))
