"""A schedule as data: the stages of each rank, and the actions of each rank in order.

The functions that build schedules return only the compute order of each rank. `trained` and `evaluated` add the transfers
between ranks, and `trained` adds the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwright.schedules.action import COMPUTE, Action
from meshwright.schedules.transfers import in_turns, with_transfers

Placement = tuple[tuple[int, ...], ...]
"""For each pipeline rank, its virtual stages in the order in which a micro-batch visits them."""
ComputeOrder = tuple[Placement, Sequence[Sequence[Action]]]
"""The placement, and for each pipeline rank its forwards and backwards in order."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every pipeline rank for one step."""

    name: str
    micro_batches: int
    placement: Placement
    actions: tuple[tuple[Action, ...], ...]
    """For each rank, its actions in the order in which its host issues them."""
    units: tuple[int, ...] | None = None
    """Number of FSDP units of each stage after `expand`; None if the actions are of whole stages."""

    @property
    def ranks(self) -> int:
        return len(self.placement)

    @property
    def stages(self) -> int:
        return sum(map(len, self.placement))

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return rank_of(self.placement)

    @property
    def channels(self) -> tuple[tuple[int, int], ...]:
        """(sender, receiver) for each pair of ranks that exchange messages. Each pair has its own communicator."""
        return channels(self.placement, forward_only=not self.trains)

    @property
    def trains(self) -> bool:
        """Whether the step ends with the optimizer. It does not for `forward_only`."""
        return any(action.op == "optim" for action in self.actions[0])

    def compute(self, rank: int) -> tuple[Action, ...]:
        """Return the rank's compute actions in order, without transfers and collectives."""
        return tuple(action for action in self.actions[rank] if action.op in COMPUTE)

    def in_turns(self) -> Schedule:
        """Return the step with each message exchanged only when its receiver needs it (see `transfers.in_turns`)."""
        return replace(self, actions=in_turns(self.rank_of, self.actions))

    def only(self, micro_batches: Sequence[int]) -> Schedule:
        """Return the step with only these micro-batches, which are counted from 0."""
        numbers = {micro_batch: number for number, micro_batch in enumerate(micro_batches)}
        actions = tuple(
            tuple(kept for action in rank_actions if (kept := _renumbered(action, numbers)) is not None)
            for rank_actions in self.actions
        )
        return replace(self, micro_batches=len(numbers), actions=actions)

    def __str__(self) -> str:
        return "\n".join(f"{rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.actions))


def _renumbered(action: Action, numbers: Mapping[int, int]) -> Action | None:
    """Return the action with its micro-batch's new number; None if its micro-batch is not in `numbers`."""
    if action.pair:
        parts = [kept for part in action.pair if (kept := _renumbered(part, numbers)) is not None]
        return action._replace(pair=tuple(parts)) if len(parts) == 2 else next(iter(parts), None)
    if action.micro_batch < 0:
        return action
    number = numbers.get(action.micro_batch)
    return None if number is None else action._replace(micro_batch=number)


def looped(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Return the round-robin placement: stage s is on rank s mod `ranks`."""
    return tuple(tuple(range(rank, ranks * stages_per_rank, ranks)) for rank in range(ranks))


def vee(ranks: int) -> Placement:
    """Return the V-shaped placement, with two stages per rank.

    The stages go from rank 0 to the last rank and back, so rank 0 has the first and the last stage. Example: 2 ranks have
    the stages (0, 3) and (1, 2).
    """
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def rank_of(placement: Placement) -> tuple[int, ...]:
    """Return the rank of each stage."""
    holders = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    return tuple(holders[stage] for stage in range(len(holders)))


def channels(placement: Placement, *, forward_only: bool = False) -> tuple[tuple[int, int], ...]:
    """Return (sender, receiver) for each pair of ranks that exchange activations or, unless `forward_only`, gradients."""
    down = {pair for pair in pairwise(rank_of(placement)) if pair[0] != pair[1]}
    up = set() if forward_only else {(receiver, sender) for sender, receiver in down}
    return tuple(sorted(down | up))


def trained(name: str, micro_batches: int, placement: Placement, compute: Sequence[Sequence[Action]]) -> Schedule:
    """Return the schedule of a training step. `compute` is each rank's order of forwards and backwards."""
    end = (Action("norm_barrier"), Action("optim"))
    actions = with_transfers(rank_of(placement), compute)
    return Schedule(name, micro_batches, placement, tuple(rank_actions + end for rank_actions in actions))


def evaluated(name: str, micro_batches: int, placement: Placement, compute: Sequence[Sequence[Action]]) -> Schedule:
    """Return the schedule of a pass without backward. `compute` is each rank's order of `forward_only` actions."""
    return Schedule(name, micro_batches, placement, with_transfers(rank_of(placement), compute))
