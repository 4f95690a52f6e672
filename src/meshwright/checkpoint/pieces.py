"""Assigns each piece of a tensor to the rank that writes it, on the first rank before any write. Torch-free.

Ranks may hold different tensors, as pipeline stages do, and the same piece more than once: replicas, or an embedding
tied across two stages. Together they must hold every tensor whole, and what several hold is written once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.checkpoint.boxes import leaves, overlapping, volume
from meshwright.checkpoint.header import ITEM_BYTES
from meshwright.spec.errors import BadInput

_SHOWN_PIECES = 4
"""Pieces that a message lists."""


@dataclass(frozen=True)
class Piece:
    """What `rank` holds of the tensor `name`: the box at `offsets` of `sizes`, in elements per dimension.

    `shape` is the whole tensor's, `dtype` safetensors' name.
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


def assign_writers(held: Iterable[Piece]) -> set[Piece]:
    """The pieces that are written, so that every element of every tensor is written exactly once.

    A piece that several ranks hold goes to the one with the fewest bytes to write so far, the lowest of them on a tie.
    The answer follows from `held` alone, in whatever order. Raises BadInput naming the first tensor on whose shape or
    dtype ranks disagree, of which a part is held by no rank, or whose pieces overlap without being the same.
    """
    tensors: dict[str, list[Piece]] = defaultdict(list)
    for piece in sorted(held, key=lambda piece: (piece.name, piece.rank, piece.offsets)):
        tensors[piece.name].append(piece)
    copies = [same for pieces in tensors.values() for same in _copies(pieces)]
    load: Counter[int] = Counter()
    written: set[Piece] = set()
    # What only one rank holds is settled first; the rest, largest first, evens out what remains.
    for same in sorted(copies, key=lambda same: (len(same) > 1, -same[0].bytes)):
        writer = min(same, key=lambda piece: (load[piece.rank], piece.rank))
        load[writer.rank] += writer.bytes
        written.add(writer)
    return written


def _copies(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """One tensor's distinct pieces, each with all that hold it; empty ones of a tensor with elements are left out."""
    first = pieces[0]
    for piece in pieces:
        if (piece.shape, piece.dtype) != (first.shape, first.dtype):
            raise BadInput(
                f"{first.name} is {first.dtype} of shape {first.shape} on rank {first.rank} and {piece.dtype} of shape "
                f"{piece.shape} on rank {piece.rank}; a name stands for one tensor on all ranks"
            )
    copies: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Piece]] = defaultdict(list)
    for piece in pieces:
        if math.prod(piece.sizes) or not math.prod(piece.shape):
            copies[piece.offsets, piece.sizes].append(piece)
    _check_filled(first, [same[0] for same in copies.values()])
    return list(copies.values())


def _check_filled(first: Piece, distinct: Sequence[Piece]) -> None:
    """Raise BadInput unless the distinct pieces of the tensor of `first` fill it exactly once."""
    what = f"{first.name} of shape {first.shape}"
    outside = next((piece for piece in distinct if leaves(piece, first.shape)), None)
    if outside is not None:
        raise BadInput(f"{what}: {outside}, which is not inside it")
    met = overlapping(distinct)
    if met is not None:
        raise BadInput(f"{what}: {met[0]} and {met[1]}; pieces must be the same or share no element")
    missing = math.prod(first.shape) - volume(distinct)
    if missing:
        raise BadInput(
            f"{what}: {missing} of its {math.prod(first.shape)} elements are held by no rank; {_piece_list(distinct)}"
        )


def _piece_list(pieces: Sequence[Piece]) -> str:
    if not pieces:
        return "no rank holds any"
    more = f" and {len(pieces) - _SHOWN_PIECES} more pieces" if len(pieces) > _SHOWN_PIECES else ""
    return ", ".join(map(str, pieces[:_SHOWN_PIECES])) + more
