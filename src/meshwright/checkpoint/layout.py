"""Computes the layout of a rank's checkpoint file: the offset of each piece of state. It is the same for all saves.

DCP (`torch.distributed.checkpoint`) plans as for a save (`checkpoint.storage`), but nothing is written. The planned
pieces are recorded with their offsets in the file's data section. The arena, the host memory that holds a snapshot for
the writer process, has the same layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from meshwright.checkpoint.contents import Contents
from meshwright.checkpoint.dcp_parts import DCPParts
from meshwright.checkpoint.fit import check_storable
from meshwright.checkpoint.header import TensorHeader
from meshwright.checkpoint.ranks import Ranks
from meshwright.checkpoint.storage import (
    PiecePlanner,
    ShardWriter,
    order_items,
    resolve_tensor,
    shard_name,
    write_results,
)
from meshwright.state.parts import StateParts


@dataclass(frozen=True)
class FilePiece:
    """A piece of the tensor `name`: its first byte `start` in the data section, and the live state `source` as uint8."""

    name: str
    source: Tensor
    start: int

    @property
    def end(self) -> int:
        return self.start + self.source.numel()


@dataclass(frozen=True)
class FileLayout:
    """The entries of this rank's file in every save, in file order.

    `contents`, on the first rank only, has the file and key of every piece of all ranks.
    """

    headers: tuple[TensorHeader, ...]
    pieces: tuple[FilePiece, ...]
    contents: Contents = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(header.bytes for header in self.headers)


def plan_layout(ranks: Ranks, tensors: Mapping[str, StateParts]) -> FileLayout:
    """This rank's layout for saves of `tensors`, which must not be reallocated later. Collective over `ranks`.

    Raises the errors of `CheckpointStore.save` for tensors that cannot be stored.
    """
    activity = "planning checkpoints"
    ranks.run_on_all(activity, lambda: check_storable(tensors))
    recorder = _LayoutRecorder(ranks.rank)
    options = {"no_dist": True} if ranks.is_single else {"process_group": ranks.group}
    dcp_tensors = {name: DCPParts(parts) for name, parts in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        ranks.run_collective(
            activity, lambda: dcp.save(dcp_tensors, storage_writer=recorder, planner=PiecePlanner(), **options)
        )
    ranks.run_on_all(activity, lambda: _reraise(recorder.failure))
    return FileLayout(tuple(recorder.headers), tuple(recorder.pieces), recorder.contents)


class _LayoutRecorder(ShardWriter):
    """A DCP storage writer that records the pieces that this rank would write, and writes nothing."""

    def __init__(self, rank: int) -> None:
        super().__init__(Path(), rank, pinned=False)
        self.headers: list[TensorHeader] = []
        self.pieces: list[FilePiece] = []

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        items, self.headers = order_items(plan)
        start = 0
        for item, header in zip(items, self.headers, strict=True):
            tensor = resolve_tensor(planner, item).detach()
            assert tensor.is_contiguous(), header.key
            self.pieces.append(FilePiece(item.index.fqn, tensor.reshape(-1).view(torch.uint8), start))
            start += header.bytes
        return write_results(items, self.headers, shard_name(self.rank))


def _reraise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
