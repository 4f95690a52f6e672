"""Computes the layout of a rank's checkpoint file: the offset of each piece of state. It is the same for all saves.

DCP (`torch.distributed.checkpoint`) plans as for a save (`checkpoint.write.storage`), but nothing is written. The planned
pieces are recorded with their offsets in the file's data section. The arena, the host memory that holds a snapshot for
the writer process, has the same layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from meshwright.checkpoint.format.contents import Contents
from meshwright.checkpoint.format.header import TensorHeader
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.read.fit import check_storable
from meshwright.checkpoint.write.dcp_parts import DCPParts
from meshwright.checkpoint.write.storage import (
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

    With `replica`, the entries of that rank's file follow in `replica_headers` and `pieces`: the state is the same on both ranks.
    `contents` has the file and key of every piece of all ranks. The first rank has them, and the rank whose `replica` it is.
    """

    headers: tuple[TensorHeader, ...]
    pieces: tuple[FilePiece, ...]
    contents: Contents = field(default_factory=dict)
    replica: int | None = None
    replica_headers: tuple[TensorHeader, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(header.bytes for header in (*self.headers, *self.replica_headers))


def plan_layout(
    ranks: RankGroup, tensors: Mapping[str, StateParts], replicas: Sequence[int] | None = None
) -> FileLayout:
    """This rank's layout for saves of `tensors`, which must not be reallocated later. Collective over `ranks`.

    `replicas` has for each rank another one with the same state, whose entries its layout has too. Raises the errors of
    `CheckpointStore.save` for tensors that cannot be stored.
    """
    activity = "planning checkpoints"
    ranks.run_on_all(activity, lambda: check_storable(tensors))
    recorder = _LayoutRecorder(ranks.rank, replicas)
    options = {"no_dist": True} if ranks.is_single else {"process_group": ranks.group}
    dcp_tensors = {name: DCPParts(parts) for name, parts in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        ranks.run_collective(
            activity, lambda: dcp.save(dcp_tensors, storage_writer=recorder, planner=PiecePlanner(), **options)
        )
    ranks.run_on_all(activity, lambda: _reraise(recorder.failure))
    layout = FileLayout(tuple(recorder.headers), tuple(recorder.pieces), recorder.contents)
    if replicas is None:
        return layout
    replica, contents = replicas[ranks.rank], ranks.run_on_first(activity, lambda: recorder.contents)
    return replace(
        layout,
        contents=contents if 0 in (replica, ranks.rank) else {},
        replica=replica,
        replica_headers=tuple(recorder.replica_headers),
    )


class _LayoutRecorder(ShardWriter):
    """A DCP storage writer that records the pieces that this rank and its replica would write, and writes nothing."""

    def __init__(self, rank: int, replicas: Sequence[int] | None) -> None:
        super().__init__(Path(), rank, pinned=False)
        self._replicas = replicas
        self.headers: list[TensorHeader] = []
        self.replica_headers: list[TensorHeader] = []
        self.pieces: list[FilePiece] = []

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add to each rank's plan that of its replica."""
        if self._replicas is None:
            return plans
        return [replace(plan, storage_data=plans[self._replicas[rank]]) for rank, plan in enumerate(plans)]

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        items, self.headers = order_items(plan)
        start = self._record(planner, items, self.headers, 0)
        if plan.storage_data is not None:
            replica_items, self.replica_headers = order_items(plan.storage_data)
            self._record(planner, replica_items, self.replica_headers, start)
        return write_results(items, self.headers, shard_name(self.rank))

    def _record(
        self, planner: SavePlanner, items: Sequence[WriteItem], headers: Sequence[TensorHeader], start: int
    ) -> int:
        """Record the pieces of `items`, which lie from `start` on; returns their end."""
        for item, header in zip(items, headers, strict=True):
            tensor = resolve_tensor(planner, item).detach()
            assert tensor.is_contiguous(), header.key
            self.pieces.append(FilePiece(item.index.fqn, tensor.reshape(-1).view(torch.uint8), start))
            start += header.bytes
        return start


def _reraise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
