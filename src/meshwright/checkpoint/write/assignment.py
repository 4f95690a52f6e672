"""Decides which rank writes each piece of each tensor of a checkpoint. Rank 0 does so before the save.

A piece is the box (rectangular part) of a tensor that a rank holds. Ranks may hold different tensors, as pipeline stages
do. Several ranks may hold the same piece, such as replicas, or an embedding that two stages share. Such a piece is written
once. The pieces of all ranks together must cover every tensor.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.checkpoint.format.boxes import count_elements, exceeds_shape, find_overlap
from meshwright.checkpoint.format.header import TensorHeader
from meshwright.spec.errors import BadInput

_MAX_SHOWN_PIECES = 4
"""An error message lists at most this many pieces."""


@dataclass(frozen=True)
class RankPiece:
    """The box of a tensor that one rank holds.

    `name`, `shape` and `dtype` describe the whole tensor; `dtype` is safetensors' name, such as `F32`. `offsets` is the
    index of the box's first element, and `sizes` its shape, both in elements per dimension.
    """

    rank: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.header.bytes

    @property
    def key(self) -> str:
        """The piece's key in the rank's file: the tensor's name, and for a part of a tensor also `[offsets]`.

        So the checkpoint of a single rank is a safetensors file with the usual keys.
        """
        return self.name if self.sizes == self.shape else f"{self.name}[{','.join(map(str, self.offsets))}]"

    @property
    def header(self) -> TensorHeader:
        return TensorHeader(self.key, self.dtype, self.sizes)

    def __str__(self) -> str:
        return f"rank {self.rank} holds {self.sizes} at {self.offsets}"


def assign_writers(pieces: Iterable[RankPiece]) -> set[RankPiece]:
    """Return the pieces to write. Each element of each tensor is in exactly one of them; its `rank` is the writer.

    If several ranks hold a piece, it is written by the one that has the fewest bytes to write so far, on a tie by the
    lowest rank. The result does not depend on the order of `pieces`.

    Raises BadInput, naming the tensor, if ranks disagree on its shape or dtype, if no rank holds some part of it, or if
    two pieces overlap without being the same.
    """
    pieces_by_tensor: dict[str, list[RankPiece]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda piece: (piece.name, piece.rank, piece.offsets)):
        pieces_by_tensor[piece.name].append(piece)
    replica_lists = [
        replicas for tensor_pieces in pieces_by_tensor.values() for replicas in _group_replicas(tensor_pieces)
    ]
    bytes_of_rank: Counter[int] = Counter()
    chosen: set[RankPiece] = set()
    # First the pieces that only one rank holds, because their writer is fixed. The others, largest first, balance the load.
    for replicas in sorted(replica_lists, key=lambda replicas: (len(replicas) > 1, -replicas[0].bytes)):
        piece = min(replicas, key=lambda piece: (bytes_of_rank[piece.rank], piece.rank))
        bytes_of_rank[piece.rank] += piece.bytes
        chosen.add(piece)
    return chosen


def _group_replicas(tensor_pieces: Sequence[RankPiece]) -> list[list[RankPiece]]:
    """Group the pieces of one tensor by box. A group has one piece for each rank that holds the box.

    Empty pieces are left out, unless the tensor itself has no elements.
    """
    first = tensor_pieces[0]
    for piece in tensor_pieces:
        if (piece.shape, piece.dtype) != (first.shape, first.dtype):
            raise BadInput(
                f"{first.name} is {first.dtype} of shape {first.shape} on rank {first.rank} and {piece.dtype} of shape "
                f"{piece.shape} on rank {piece.rank}; a name stands for one tensor on all ranks"
            )
    replicas_by_box: dict[tuple[tuple[int, ...], tuple[int, ...]], list[RankPiece]] = defaultdict(list)
    for piece in tensor_pieces:
        if math.prod(piece.sizes) or not math.prod(piece.shape):
            replicas_by_box[piece.offsets, piece.sizes].append(piece)
    _check_coverage(first.name, first.shape, [replicas[0] for replicas in replicas_by_box.values()])
    return list(replicas_by_box.values())


def _check_coverage(name: str, shape: tuple[int, ...], pieces: Sequence[RankPiece]) -> None:
    """Raise BadInput unless the pieces cover each element of the tensor `name` exactly once."""
    label = f"{name} of shape {shape}"
    outside = next((piece for piece in pieces if exceeds_shape(piece, shape)), None)
    if outside is not None:
        raise BadInput(f"{label}: {outside}, which is not inside it")
    overlap = find_overlap(pieces)
    if overlap is not None:
        raise BadInput(f"{label}: {overlap[0]} and {overlap[1]}; pieces must be the same or share no element")
    missing = math.prod(shape) - count_elements(pieces)
    if missing:
        raise BadInput(
            f"{label}: {missing} of its {math.prod(shape)} elements are held by no rank; {_describe_pieces(pieces)}"
        )


def _describe_pieces(pieces: Sequence[RankPiece]) -> str:
    if not pieces:
        return "no rank holds any"
    more = f" and {len(pieces) - _MAX_SHOWN_PIECES} more pieces" if len(pieces) > _MAX_SHOWN_PIECES else ""
    return ", ".join(map(str, pieces[:_MAX_SHOWN_PIECES])) + more
