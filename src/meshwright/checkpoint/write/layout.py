"""The layout of a rank's checkpoint file: which pieces of state the rank writes, and where each piece begins.

Synchronous and asynchronous saves both use it. Four words: a box is a rectangular part of a tensor. A piece is a box that a rank has, with
the name of its tensor. An entry is the header of a piece in a file. A chunk is what the manifest records about a piece. Each rank lists its
boxes, and the first rank chooses which rank writes each of them (`checkpoint.write.assignment`). The layout depends only on how the state
is distributed, so it stays the same until the job starts again.

A snapshot buffer, the host memory that keeps a snapshot for the writer process, has the layout of the file's data section.

Example: two ranks have rows 0 to 3 and 4 to 7 of `model.w`, shape (8, 2) in F32, and both have `model.b`, shape (2,). Rank 0 writes
`model.b` (bytes 0 to 7 of its data section) and `model.w[0,0]` (bytes 8 to 39); rank 1 writes `model.w[4,0]`. The key `model.w[4,0]`
belongs to the box that begins at row 4, column 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.checkpoint.format.contents import Contents, TensorChunk, TensorRecord
from meshwright.checkpoint.format.header import ITEM_BYTES, TensorHeader
from meshwright.checkpoint.format.manifest import tensor_file
from meshwright.checkpoint.local_tensors import LocalTensor, check_storable, dtype_name, local_boxes
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.write.assignment import RankPiece, assign_writers
from meshwright.spec.errors import BadInput
from meshwright.state.parts import EncodedState, StateParts


@dataclass(frozen=True)
class FilePiece:
    """A piece of the tensor `name`, stored as the entry `header`, which begins at byte `start` of the data section.

    `elements` is the live state. Of encoded state, which is kept in another form than it is stored in, it is a tensor on the meta device:
    it has no numbers, and tells `encoded.read` which elements to decode.
    """

    name: str
    header: TensorHeader
    start: int
    elements: Tensor
    encoded: EncodedState | None = None

    @property
    def end(self) -> int:
        return self.start + self.header.bytes

    @property
    def source(self) -> Tensor:
        """The elements as bytes (uint8)."""
        assert self.elements.is_contiguous(), self.header.key
        return self.elements.reshape(-1).view(torch.uint8)

    def values(self) -> Tensor:
        """The elements, or a copy of encoded state."""
        return self.elements if self.encoded is None else self.encoded.read(self.elements)


@dataclass(frozen=True)
class FileLayout:
    """The pieces of this rank's file, in file order.

    `replica` is the number of another rank with the same state, if there is one. The pieces of that rank's file then follow,
    so that this rank can write them if the other one is lost. `contents` has the file and key of every piece of all ranks.
    It is filled on rank 0, and on the rank whose `replica` is 0; elsewhere it is empty.
    """

    own_pieces: tuple[FilePiece, ...]
    contents: Contents = field(default_factory=dict)
    replica: int | None = None
    replica_pieces: tuple[FilePiece, ...] = ()

    @property
    def pieces(self) -> tuple[FilePiece, ...]:
        return self.own_pieces + self.replica_pieces

    @property
    def headers(self) -> tuple[TensorHeader, ...]:
        """The entries of this rank's file."""
        return tuple(piece.header for piece in self.own_pieces)

    @property
    def replica_headers(self) -> tuple[TensorHeader, ...]:
        """The entries of the replica's file."""
        return tuple(piece.header for piece in self.replica_pieces)

    @property
    def bytes(self) -> int:
        return sum(piece.header.bytes for piece in self.pieces)


def plan_layout(
    ranks: RankGroup,
    tensors: Mapping[str, LocalTensor],
    replicas: Sequence[int] | None = None,
    *,
    activity: str = "planning checkpoints",
) -> FileLayout:
    """This rank's layout for saves of `tensors`. Collective over `ranks`.

    The layout refers to the memory of these tensors: they may only be updated in place while it is used. `replicas[r]` is a rank with the
    same state as rank r, and the layout of r has the pieces of both. Raises BadInput for what
    cannot be stored, and where the pieces of all ranks do not cover a tensor exactly once.
    """
    all_written: list[list[RankPiece]] = []
    """The pieces that each rank writes; on the first rank only."""

    def describe() -> _Described:
        check_storable(tensors)
        return _describe(ranks.rank, tensors)

    def assign(described: list[_Described]) -> list[list[list[RankPiece]]]:
        all_written.extend(_assign(described))
        return [[own, [] if replicas is None else all_written[replicas[rank]]] for rank, own in enumerate(all_written)]

    own, of_replica = ranks.assign(activity, describe, assign)
    elements = {
        (name, offsets, tuple(box.shape)): (box, tensor.encoded if isinstance(tensor, StateParts) else None)
        for name, tensor in tensors.items()
        for offsets, box in local_boxes(tensor)
    }
    pieces: list[FilePiece] = []
    start = 0
    for piece in own + of_replica:
        pieces.append(FilePiece(piece.name, piece.header, start, *elements[piece.name, piece.offsets, piece.sizes]))
        start = pieces[-1].end
    own_pieces = tuple(pieces[: len(own)])
    if replicas is None:
        return FileLayout(own_pieces, _contents(all_written))
    replica = replicas[ranks.rank]
    contents = ranks.run_on_first(activity, lambda: _contents(all_written))
    return FileLayout(own_pieces, contents if 0 in (replica, ranks.rank) else {}, replica, tuple(pieces[len(own) :]))


_Described = tuple[list[RankPiece], list[str]]
"""The pieces that a rank has, and the names of tensors of which it has none."""


def _describe(rank: int, tensors: Mapping[str, LocalTensor]) -> _Described:
    pieces = [
        RankPiece(rank, name, tuple(tensor.shape), dtype_name(tensor.dtype), offsets, tuple(elements.shape))
        for name, tensor in tensors.items()
        for offsets, elements in local_boxes(tensor)
    ]
    return pieces, sorted(tensors.keys() - {piece.name for piece in pieces})


def _assign(described: Sequence[_Described]) -> list[list[RankPiece]]:
    """The pieces that each rank writes, in file order: by element size, largest first, then by name and offsets.

    Raises BadInput as `assign_writers` does, and for a tensor that was passed only by ranks outside its device mesh.
    """
    chosen = assign_writers(piece for pieces, _ in described for piece in pieces)
    stored = {piece.name for piece in chosen}
    for rank, (_, names) in enumerate(described):
        absent = next((name for name in names if name not in stored), None)
        if absent is not None:
            raise BadInput(
                f"rank {rank} passes {absent} but is not in its device mesh, and no rank of that mesh passes it; pass it on all ranks"
            )
    written: list[list[RankPiece]] = [[] for _ in described]
    for piece in sorted(chosen, key=lambda piece: (-ITEM_BYTES[piece.dtype], piece.name, piece.offsets)):
        written[piece.rank].append(piece)
    return written


def _contents(written: Sequence[Sequence[RankPiece]]) -> Contents:
    """The tensors of a checkpoint of which each rank writes these pieces."""
    chunks: dict[str, list[TensorChunk]] = {}
    whole: dict[str, RankPiece] = {}
    for piece in sorted(
        (piece for pieces in written for piece in pieces), key=lambda piece: (piece.name, piece.offsets)
    ):
        chunk = TensorChunk(piece.offsets, piece.sizes, tensor_file(piece.rank), piece.key)
        chunks.setdefault(piece.name, []).append(chunk)
        whole[piece.name] = piece
    return {name: TensorRecord(whole[name].shape, whole[name].dtype, tuple(chunks[name])) for name in chunks}
