"""Collects each matrix of a bundle on one of the ranks that share it (its owner), and divides the result over these ranks again.

Two all-to-alls send each element once to the owner of its matrix and once back. So a rank sends and receives its shard twice; with an
all-gather it would receive the whole. Owners are chosen so that all ranks have similar work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.optim.matrices import MatrixPiece, matrices_of, pieces_of
from meshwright.spec.layout import Box
from meshwright.spec.model import ParameterSpec
from meshwright.spec.optimizers import newton_schulz_flops
from meshwright.state.shared_ranks import SharedRanks


@dataclass(frozen=True)
class LocatedPiece:
    """A piece of a matrix of the parameter `name`. `matrix` is the number of the matrix in the bundle."""

    name: str
    matrix: int
    piece: MatrixPiece


def _primary(pieces: Sequence[LocatedPiece]) -> list[LocatedPiece]:
    """Return the pieces that count once: of equal pieces on several ranks, only the first rank's is primary."""
    return [piece for piece in pieces if piece.piece.primary]


def assign_owners(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Return the owner of each matrix, given the cost of each.

    The largest matrix is assigned first. A matrix is assigned to the rank with the least work so far in this bundle; among equal ranks, to
    the rank with the least work in earlier bundles. `loads` has the work in earlier bundles by rank, and this bundle's work is added to it.
    """
    owners = [0] * len(costs)
    work = [0.0] * len(loads)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = min(range(len(loads)), key=lambda rank: (work[rank], loads[rank]))
        work[owners[index]] += costs[index]
    loads[:] = [load + own for load, own in zip(loads, work, strict=True)]
    return owners


class MatrixExchange:
    """Exchanges the matrices of a bundle: of some `parameters`, of which ranks have pieces.

    `loads` is the work that each rank has by the bundles before; the work of this bundle is added to it.
    """

    def __init__(self, parameters: Sequence[ParameterSpec], ranks: SharedRanks, loads: list[float]) -> None:
        self._ranks = ranks
        self._matrices: list[Box] = []
        pieces: list[list[LocatedPiece]] = [[] for _ in loads]
        for spec in parameters:
            matrices = matrices_of(spec)
            for rank, boxes in enumerate(ranks.boxes(spec)):
                found = pieces_of(matrices, boxes)
                pieces[rank] += [LocatedPiece(spec.name, len(self._matrices) + piece.matrix, piece) for piece in found]
            self._matrices += matrices
        owners = assign_owners([newton_schulz_flops(matrix.sizes[-2:], 1) for matrix in self._matrices], loads)
        self._owned = [index for index, owner in enumerate(owners) if owner == ranks.index]
        own = pieces[ranks.index]
        # By rank, the pieces that this rank exchanges with it. On the way to the owners (`_sent`, `_collected`) only primary
        # pieces are sent; on the way back (`_returned`, `_kept`) all pieces.
        self._kept = [[piece for piece in own if owners[piece.matrix] == rank] for rank in range(len(loads))]
        self._sent = [_primary(pieces_for_rank) for pieces_for_rank in self._kept]
        self._returned = [[piece for piece in of_rank if owners[piece.matrix] == ranks.index] for of_rank in pieces]
        self._collected = [_primary(pieces_of_rank) for pieces_of_rank in self._returned]

    def apply(
        self, parts: dict[str, Tensor], function: Callable[[list[Tensor]], list[Tensor]], dtype: torch.dtype
    ) -> None:
        """Apply `function` to whole matrices, and replace this rank's `parts` (by parameter name) by its parts of the results.

        `function` is called with the matrices that this rank owns. Elements are sent in `dtype`. Collective over the ranks that share the
        parameters.
        """
        device = next(iter(parts.values())).device
        received = self._all_to_all(
            [[p.piece.of(parts[p.name]) for p in there] for there in self._sent], self._collected, dtype, device
        )
        wholes = {index: torch.empty(self._matrices[index].sizes, dtype=dtype, device=device) for index in self._owned}
        for located, elements in received:
            target = wholes[located.matrix][located.piece.whole]
            target.copy_(elements.view(target.shape))
        results = dict(zip(self._owned, function([whole.flatten(0, -2) for whole in wholes.values()]), strict=True))
        whole_results = {index: result.view(self._matrices[index].sizes) for index, result in results.items()}
        returned = [[whole_results[p.matrix][p.piece.whole] for p in there] for there in self._returned]
        for located, elements in self._all_to_all(returned, self._kept, dtype, device):
            target = located.piece.of(parts[located.name])
            target.copy_(elements.view(target.shape))

    def _all_to_all(
        self, sent: list[list[Tensor]], expected: list[list[LocatedPiece]], dtype: torch.dtype, device: torch.device
    ) -> list[tuple[LocatedPiece, Tensor]]:
        """Send tensors, by rank. Returns the received pieces with their elements; `expected` lists these pieces by rank."""
        flat = [tensor.to(dtype).reshape(-1) for there in sent for tensor in there]
        outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        incoming = outgoing
        if self._ranks.group is not None:
            counts = [sum(p.piece.count for p in there) for there in expected]
            incoming = torch.empty(sum(counts), dtype=dtype, device=device)
            sizes = [sum(tensor.numel() for tensor in there) for there in sent]
            dist.all_to_all_single(incoming, outgoing, counts, sizes, group=self._ranks.group)
        located = [p for there in expected for p in there]
        return list(zip(located, incoming.split([p.piece.count for p in located]), strict=True))
