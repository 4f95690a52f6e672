"""Which of a layer's experts are present on which ranks in a step, and to which ranks the rows of each rank go.

The experts that are present on a rank are those it owns and copies of other ranks' experts. Their weights are stacked in slots. The number
of slots is constant, so shapes do not change; a free slot gets no rows. If a rank has a slot for every expert, slot e has expert e.
Otherwise the rank's own experts come first, then its copies in ascending order.

Example: 2 ranks, 4 experts, 3 slots, and rank 0 has a copy of expert 3. Its slots have experts 0, 1 and 3. Rank 1 has experts 2 and 3 and a
free slot.

Shapes: R ranks of the group that has the layer's experts, E experts, S slots of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.policies.expert_placement import fixed_copies
from meshwright.spec.plan import ExpertPlan


class ExpertTransfer(NamedTuple):
    """A copy of an expert that this rank sends to or receives from another rank; the copy's gradient goes the opposite way."""

    sends: bool
    peer: int
    slot: int


@dataclass(frozen=True)
class Tables:
    """The tables for one set of present experts, on the host. Shapes are those of the module's docstring."""

    present: np.ndarray
    """Whether an expert is present on a rank, `(R, E)`."""
    transfers: tuple[ExpertTransfer, ...]
    """The copies of experts that this rank sends or receives, sorted by expert, then by receiving rank.

    The messages between two ranks are therefore in the same order on both.
    """
    slot_of: np.ndarray
    """Slot of each expert on each rank, `(R, E)`; S if the expert is not present."""
    expert_in: np.ndarray
    """Expert in each slot of each rank, `(R, S)`; E if the slot is free."""
    position: np.ndarray
    """To which ranks the rows of this rank go, `(E, R)`; see `PresentExperts.position`."""


class PresentExperts:
    """The experts of one layer that are present on each rank of a group, as `rank` sees them.

    `nodes` has the node of each rank of the group. The tables on the device are changed in place, so that compiled code reads the current
    values. At the start each rank has the experts that it owns; with policy `fixed` each rank also has the fixed copies.
    """

    def __init__(self, experts: int, plan: ExpertPlan, nodes: Sequence[int], rank: int, device: torch.device) -> None:
        self.ranks = len(nodes)
        self.experts = experts
        self.rank = rank
        self.nodes = np.array(nodes)
        self.owned = experts // self.ranks
        self.slots = min(self.owned + plan.slots, experts)
        self.always_all = plan.policy == "fixed" and self.slots == experts
        """Whether all experts are present on all ranks in every step. No rows are sent then, and nothing depends on loads."""
        self.all_present = False
        self.transfers: tuple[ExpertTransfer, ...] = ()
        self.slot_of = torch.empty(self.ranks, experts, dtype=torch.int64, device=device)
        """Slot of each expert on each rank, `(R, E)`; S if it is not present."""
        self.expert_in = torch.empty(self.ranks, self.slots, dtype=torch.int64, device=device)
        """Expert in each slot of each rank, `(R, S)`; E if the slot is free."""
        self.position = torch.empty(experts, self.ranks, dtype=torch.int64, device=device)
        """To which ranks this rank's rows of an expert go, `(E, R)`: the ranks are numbered from 0; R if no rows go to the rank.

        If a load cannot be divided evenly, the ranks with the lowest numbers get one row more.
        """
        self.local = torch.empty(1, dtype=torch.int64)
        """`all_present` as a host tensor that operators read: 1 if no row leaves its rank."""
        self.own = np.arange(experts) // self.owned == np.arange(self.ranks)[:, None]
        """Whether a rank owns an expert, `(R, E)`."""
        self.present = np.empty(0)
        self._tables: Tables | None = None
        self.set(fixed_copies(self.own[None], plan.slots)[0] if plan.policy == "fixed" else self.own)

    def set(self, present: np.ndarray) -> None:
        """Set the present experts, `(R, E)` booleans; owned experts are always present. Do not call it between forward and backward."""
        self.use(self.tables(present))

    def use(self, tables: Tables) -> None:
        """Set the present experts, given the `tables` that were computed for them earlier."""
        if tables is self._tables:  # the set of present experts did not change
            return
        self._tables = tables
        self.present = tables.present
        self.transfers = tables.transfers
        self.all_present = bool(tables.present.all())
        self.local[0] = self.all_present
        for target in ("slot_of", "expert_in", "position"):
            _upload(getattr(tables, target), getattr(self, target))

    def tables(self, present: np.ndarray) -> Tables:
        """Compute the tables for present experts `(R, E)`, to which the owned experts are added."""
        present = present | self.own
        experts = np.arange(self.experts)
        assert (present.sum(1) <= self.slots).all(), "a policy keeps to the slots"
        slot_of = np.where(present, self._slot_numbers(present), self.slots)
        expert_in = np.full((self.ranks, self.slots + 1), self.experts)
        np.put_along_axis(expert_in, slot_of, np.broadcast_to(experts, slot_of.shape), axis=1)
        return Tables(
            present,
            self._transfers(present, slot_of),
            slot_of,
            np.ascontiguousarray(expert_in[:, : self.slots]),
            self._positions(present),
        )

    @property
    def own_slots(self) -> slice:
        """The slots of this rank's own experts."""
        first = self.rank * self.owned if self.slots == self.experts else 0
        return slice(first, first + self.owned)

    def destinations(self, load: Tensor) -> Tensor:
        """How many of this rank's `load` `(E,)` rows go to each rank, `(E, R)`. `policies.expert_routing.route` is the same on the host."""
        takes = self.position < self.ranks
        number = takes.sum(1, keepdim=True)
        part = load[:, None] // number
        remainder = load[:, None] % number
        return takes * (part + (self.position < remainder))

    def _transfers(self, present: np.ndarray, slot_of: np.ndarray) -> tuple[ExpertTransfer, ...]:
        expert, target = np.nonzero((present & ~self.own).T)
        source = expert // self.owned
        involved = (source == self.rank) | (target == self.rank)
        expert = expert[involved]
        target = target[involved]
        sends = source[involved] == self.rank
        columns = sends, np.where(sends, target, source[involved]), slot_of[self.rank, expert]
        return tuple(map(ExpertTransfer, *(column.tolist() for column in columns)))

    def _slot_numbers(self, present: np.ndarray) -> np.ndarray:
        """Slot of each present expert, `(R, E)`."""
        if self.slots == self.experts:
            return np.broadcast_to(np.arange(self.experts), present.shape)
        copies = self.owned + (present & ~self.own).cumsum(1) - 1
        return np.where(self.own, np.arange(self.experts) % self.owned, copies)

    def _positions(self, present: np.ndarray) -> np.ndarray:
        """Compute `position`. Rows go to this rank if it has the expert, else to the copies in its node, else to all copies.

        The numbers of the target ranks are rotated by this rank and the expert. Otherwise the same copy would always get the extra row.
        """
        candidates = present.T & (self.nodes == self.nodes[self.rank])
        candidates = np.where(candidates.any(1, keepdims=True), candidates, present.T)
        here = present[self.rank][:, None]
        candidates = np.where(here, np.arange(self.ranks) == self.rank, candidates)
        number = candidates.sum(1, keepdims=True)
        shift = self.rank + np.arange(self.experts)[:, None]
        return np.where(candidates, (candidates.cumsum(1) - 1 + shift) % number, self.ranks)


def _upload(values: np.ndarray, target: Tensor) -> None:
    """Copy host values to a device tensor. It does not wait for the device, which may still compute the previous step."""
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
