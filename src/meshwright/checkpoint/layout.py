"""The layout of a rank's file, computed once per start: where each piece of state lies follows from the Plan alone.

DCP plans as it does for a save (`checkpoint.storage`), but nothing is written: the planned pieces are kept with their offsets in the file's
data section, which is also the layout of the arena.
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
from meshwright.checkpoint.storage import PiecePlanner, ShardWriter, in_file_order, resolved, results_of, shard_name
from meshwright.state.parts import StateParts


@dataclass(frozen=True)
class FilePiece:
    """A piece of the tensor `name` and its `start` in the data section; `source` is its live memory, as bytes."""

    name: str
    source: Tensor
    start: int

    @property
    def end(self) -> int:
        return self.start + self.source.numel()


@dataclass(frozen=True)
class FileLayout:
    """The items of this rank in every save, in file order; `contents`, on the first rank, locates all ranks' pieces."""

    headers: tuple[TensorHeader, ...]
    pieces: tuple[FilePiece, ...]
    contents: Contents = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(header.bytes for header in self.headers)


def plan_layout(ranks: Ranks, tensors: Mapping[str, StateParts]) -> FileLayout:
    """This rank's layout for saves of `tensors`, whose memory must stay where it is. Collective over `ranks`.

    Raises what `CheckpointStore.save` raises for tensors that cannot be stored.
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
    """Keeps what DCP would have this rank write."""

    def __init__(self, rank: int) -> None:
        super().__init__(Path(), rank, pinned=False)
        self.headers: list[TensorHeader] = []
        self.pieces: list[FilePiece] = []

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        items, self.headers = in_file_order(plan)
        start = 0
        for item, header in zip(items, self.headers, strict=True):
            tensor = resolved(planner, item).detach()
            assert tensor.is_contiguous(), header.key
            self.pieces.append(FilePiece(item.index.fqn, tensor.reshape(-1).view(torch.uint8), start))
            start += header.bytes
        return results_of(items, self.headers, shard_name(self.rank))


def _reraise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
