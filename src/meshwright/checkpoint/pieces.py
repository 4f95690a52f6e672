"""Assigns each piece of each tensor of a checkpoint to the rank that writes it, on rank 0 before the save. Torch-free.

Ranks may hold different tensors, as pipeline stages do, and the same piece more than once: replicas, or an embedding
tied across two stages. Together they must hold every tensor whole. A piece that several ranks hold is written once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.checkpoint.boxes import exceeds, overlapping, volume
from meshwright.checkpoint.header import ITEM_BYTES
from meshwright.spec.errors import BadInput

_SHOWN_PIECES = 4
"""Pieces that a message lists."""


@dataclass(frozen=True)
class Piece:
    """The part of the tensor `name` that `rank` holds: the box at `offsets` of `sizes`, in elements per dimension.

    `shape` is the whole tensor's. `dtype` is safetensors' name of the type.
    """

    rank: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"rank {self.rank} holds {self.sizes} at {self.offsets}"


def assign_writers(pieces: Iterable[Piece]) -> set[Piece]:
    """The pieces to write, each with its writer, so that every element of every tensor is written exactly once.

    Of the ranks that hold a piece, the one with the fewest bytes to write so far writes it, the lowest rank on a tie.
    The result does not depend on the order of `pieces`. Raises BadInput, naming the first tensor on whose shape or
    dtype ranks disagree, of which no rank holds some part, or whose pieces overlap without being the same.
    """
    tensors: dict[str, list[Piece]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda piece: (piece.name, piece.rank, piece.offsets)):
        tensors[piece.name].append(piece)
    copies = [replicas for tensor_pieces in tensors.values() for replicas in _copies(tensor_pieces)]
    load: Counter[int] = Counter()
    written: set[Piece] = set()
    # Pieces with one holder come first; the others, largest first, then balance the load.
    for replicas in sorted(copies, key=lambda replicas: (len(replicas) > 1, -replicas[0].bytes)):
        writer = min(replicas, key=lambda piece: (load[piece.rank], piece.rank))
        load[writer.rank] += writer.bytes
        written.add(writer)
    return written


def _copies(tensor_pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The replicas of each distinct piece of a tensor; empty pieces of a tensor with elements are left out."""
    first = tensor_pieces[0]
    for piece in tensor_pieces:
        if (piece.shape, piece.dtype) != (first.shape, first.dtype):
            raise BadInput(
                f"{first.name} is {first.dtype} of shape {first.shape} on rank {first.rank} and {piece.dtype} of shape "
                f"{piece.shape} on rank {piece.rank}; a name stands for one tensor on all ranks"
            )
    copies: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Piece]] = defaultdict(list)
    for piece in tensor_pieces:
        if math.prod(piece.sizes) or not math.prod(piece.shape):
            copies[piece.offsets, piece.sizes].append(piece)
    _check_coverage(first, [replicas[0] for replicas in copies.values()])
    return list(copies.values())


def _check_coverage(first: Piece, distinct: Sequence[Piece]) -> None:
    """Raise BadInput unless the distinct pieces of the tensor of `first` fill it exactly once."""
    label = f"{first.name} of shape {first.shape}"
    excess = next((piece for piece in distinct if exceeds(piece, first.shape)), None)
    if excess is not None:
        raise BadInput(f"{label}: {excess}, which is not inside it")
    overlap = overlapping(distinct)
    if overlap is not None:
        raise BadInput(f"{label}: {overlap[0]} and {overlap[1]}; pieces must be the same or share no element")
    missing = math.prod(first.shape) - volume(distinct)
    if missing:
        raise BadInput(
            f"{label}: {missing} of its {math.prod(first.shape)} elements are held by no rank; {_piece_list(distinct)}"
        )


def _piece_list(pieces: Sequence[Piece]) -> str:
    if not pieces:
        return "no rank holds any"
    more = f" and {len(pieces) - _SHOWN_PIECES} more pieces" if len(pieces) > _SHOWN_PIECES else ""
    return ", ".join(map(str, pieces[:_SHOWN_PIECES])) + more
