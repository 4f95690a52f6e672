"""Computes digests of a rank's training state and exchanges them, without a wait for the device."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.ranks import RankGroup
from meshwright.kernels.checksum import digests
from meshwright.parallel.world import World
from meshwright.policies.silent_corruption import ranks_by_key
from meshwright.spec.layout import Box
from meshwright.state.parts import StateParts

# torch 2.13 has the function under another name and deprecates the old one.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class StatePiece:
    """One box of a state tensor on this rank. Pieces with the same `key` on different ranks must have the same elements."""

    label: str
    key: int
    elements: Tensor

    @classmethod
    def of(cls, parts: StateParts, box: Box, elements: Tensor) -> StatePiece:
        position = f"{parts.name} {box.offsets} {box.sizes}"
        key = int.from_bytes(hashlib.blake2b(position.encode(), digest_size=8).digest(), "big", signed=True)
        whole = box.sizes == parts.shape
        rows = "" if whole else f" rows {box.offsets[0]}-{box.offsets[0] + box.sizes[0] - 1}"
        return cls(parts.name + rows, key, elements)


@dataclass(frozen=True)
class Coverage:
    """Bytes of the state on all ranks: with a copy on another rank, in host memory, and in total."""

    replicated: int
    host: int
    total: int

    def text(self, every: int) -> str:
        """Return the sentence about what a check every `every` steps covers."""
        share = self.replicated / self.total
        host = self.host / self.total
        compared = (
            f"{share:.2%} of the state's bytes are compared with their copies on other ranks"
            if self.replicated
            else "no rank has a copy of another rank's state, so nothing is compared between ranks"
        )
        uncovered = f"; the {host:.0%} of the state in host memory is not checked" if self.host else ""
        return (
            f"supervision.check_state_every: every {every} steps {compared}, and state on the devices is checked for changes until "
            f"the next update{uncovered}"
        )


@dataclass(frozen=True)
class DigestExchange:
    """The results of a check, on their way to the host.

    - `sums` `(ranks, rows, 2)`: by rank, a row with the two digest sums of each group that the rank is in; its last row counts changed
      pieces.
    - `event`: after it `sums` can be read; None on a CPU.
    - `digests`, `changed`: this rank's digests, and whether they changed, by piece.
    """

    step: int
    sums: Tensor
    event: Any
    digests: Tensor
    changed: Tensor

    def read_sums(self) -> list[list[list[int]]]:
        """Wait for the sums and return both digest sums, by rank and group."""
        if self.event is not None:
            self.event.synchronize()
        return self.sums.tolist()


class StateDigests:
    """The pieces of this rank's state on its device, and the groups of ranks that have the same pieces. Creation is collective."""

    def __init__(self, state: Sequence[StateParts], world: World) -> None:
        self.pieces = [
            StatePiece.of(parts, box, elements)
            for parts in state
            if parts.memory == "device"
            for box, elements in parts.pieces()
            if elements.numel()
        ]
        host = sum(parts.local.nbytes for parts in state if parts.memory == "host")
        self._world = world
        self._device = world.device
        keys_and_bytes = [(piece.key, piece.elements.nbytes) for piece in self.pieces]
        answers = RankGroup(world.control).run_on_all("listing replicated state", lambda: (keys_and_bytes, host))
        owners = ranks_by_key([[key for key, _ in pieces] for pieces, _ in answers])
        self.groups = sorted(set(owners.values()))
        """The ranks of each set of copies; the list is equal on all ranks."""
        device_pieces = [piece for pieces, _ in answers for piece in pieces]
        replicated_bytes = sum(piece_bytes for key, piece_bytes in device_pieces if key in owners)
        device_bytes = sum(piece_bytes for _, piece_bytes in device_pieces)
        host_bytes = sum(bytes_of_rank for _, bytes_of_rank in answers)
        self.coverage = Coverage(replicated=replicated_bytes, host=host_bytes, total=device_bytes + host_bytes)
        numbers = {group: number for number, group in enumerate(self.groups)}
        self.group_of_piece = [numbers.get(owners.get(piece.key, ()), -1) for piece in self.pieces]
        self._own = [
            [number for number, group in enumerate(self.groups) if rank in group] for rank in range(world.ranks)
        ]
        self._sums_per_rank = max(map(len, self._own)) + 1
        own_index = {number: index for index, number in enumerate(self._own[world.rank])}
        replicated = [index for index, number in enumerate(self.group_of_piece) if number >= 0]
        self._replicated = torch.tensor(replicated, dtype=torch.int64, device=self._device)
        self._index_of_sum = torch.tensor(
            [own_index[self.group_of_piece[index]] for index in replicated], dtype=torch.int64, device=self._device
        )
        # The factors are odd and depend on the key. Pieces that swapped their contents, or changes that cancel out, then change the sum.
        factors = [[self.pieces[index].key | 1] for index in replicated]
        self._factors = torch.tensor(factors, dtype=torch.int64, device=self._device).view(-1, 1)

    def compute(self) -> Tensor:
        """Return the two digests of each piece, `(pieces, 2)`, on the device."""
        if not self.pieces:
            return torch.zeros((0, 2), dtype=torch.int64, device=self._device)
        return digests([piece.elements for piece in self.pieces])

    def exchange(self, step: int, values: Tensor, changed: Tensor, *, compare: bool) -> DigestExchange:
        """Start to send all ranks the number of `changed` pieces and, with `compare`, the digest sums of each group. Collective."""
        sums = torch.zeros((self._sums_per_rank, 2), dtype=torch.int64, device=self._device)
        if compare:
            sums.index_add_(0, self._index_of_sum, values[self._replicated] * self._factors)
        sums[-1] = changed.sum()
        table = torch.empty((self._world.ranks * self._sums_per_rank, 2), dtype=torch.int64, device=self._device)
        ALL_GATHER(table, sums)
        event = None
        if self._device.type == "cuda":
            host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            host.copy_(table, non_blocking=True)
            table = host
            event = torch.cuda.current_stream().record_event()
        return DigestExchange(step, table.view(self._world.ranks, self._sums_per_rank, 2), event, values, changed)

    def differing_groups(self, sums_by_rank: Sequence[Sequence[Sequence[int]]]) -> list[int]:
        """Return the groups whose ranks have different sums."""
        sums: list[set[tuple[int, ...]]] = [set() for _ in self.groups]
        for rank, numbers in enumerate(self._own):
            for index, number in enumerate(numbers):
                sums[number].add(tuple(sums_by_rank[rank][index]))
        return [number for number, values in enumerate(sums) if len(values) > 1]
