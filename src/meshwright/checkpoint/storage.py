"""DCP's planner and storage interfaces over our own files: torch lists the box each rank holds of each tensor, `pieces`
settles who writes it, this file moves the bytes.

Read in torch 2.11 and 2.13, whose interfaces agree:
`torch/distributed/checkpoint/{storage,planner,default_planner,state_dict_saver}.py`. What goes wrong while bytes move
is kept in `failure` instead of raised: DCP would send the exception, traceback included, through a pickle to every
rank, and the store tells all ranks in its own words. A plan that is refused is raised, by the first rank alone.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from meshwright.checkpoint.contents import Chunk, Contents, TensorRecord
from meshwright.checkpoint.dcp_parts import DCPParts
from meshwright.checkpoint.files import FileRecord, disk_space_error
from meshwright.checkpoint.header import TensorHeader
from meshwright.checkpoint.pieces import RankPiece, assign_writers
from meshwright.checkpoint.shards import dtype_name, write_shard
from meshwright.spec.errors import BadInput, OutOfResources

FLAT = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""Tensors are passed by name in one flat mapping; DCP need not look for nested ones."""


class PiecePlanner(DefaultSavePlanner):
    """Plans a save of tensors with any distribution over ranks; `assign_writers` chooses the writers or raises BadInput."""

    def __init__(self) -> None:
        super().__init__(**FLAT)

    def create_local_plan(self) -> SavePlan:
        """What this rank holds; beside it, for the first rank, the names it gave but holds nothing of."""
        plan = super().create_local_plan()
        held = {item.index.fqn for item in plan.items}
        return dataclasses.replace(plan, planner_data=sorted(self.state_dict.keys() - held))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Leave each piece to one rank; raises BadInput when the pieces of all ranks do not make whole tensors."""
        written = assign_writers(_piece(rank, item) for rank, plan in enumerate(all_plans) for item in plan.items)
        _check_held({piece.name for piece in written}, all_plans)
        plans = [
            SavePlan([item for item in plan.items if _piece(rank, item) in written])
            for rank, plan in enumerate(all_plans)
        ]
        self.global_plan, self.metadata = create_default_global_save_plan(plans)
        return self.global_plan, self.metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = _box_of(self.state_dict, index)
        return super().lookup_object(index) if found is None else found


class ShardWriter(StorageWriter):
    """Writes this rank's share of a save plan to one file, `tensors-<rank>.safetensors`, or none when the share is
    empty.
    """

    def __init__(self, folder: Path, rank: int, *, pinned: bool, progress: Callable[[int], None] | None = None) -> None:
        self.folder, self.rank = folder, rank
        self.files: dict[str, FileRecord] = {}
        self.contents: Contents = {}
        self.failure: Exception | None = None
        self._pinned, self._progress = pinned, progress

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer serves one attempt."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the folder exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Compare what all ranks will write with what the disk has free; the ranks are told through the plan."""
        need = sum(_volume(item) * _data(item).properties.dtype.itemsize for plan in plans for item in plan.items)
        short = disk_space_error(self.folder.parent, need)
        return [dataclasses.replace(plan, storage_data=short) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        try:
            if plan.storage_data is not None:
                raise OutOfResources(plan.storage_data)
            results = self._write(plan, planner)
        except Exception as error:
            self.failure = error
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank: gather where everything lies. Files are committed by the store, after every rank has
        reported.
        """
        places: dict[str, dict[tuple[int, ...], tuple[str, str]]] = defaultdict(dict)
        for result in chain.from_iterable(results):
            places[result.index.fqn][tuple(result.index.offset or ())] = result.storage_data
        for name, stored in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(stored, TensorStorageMetadata)
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
            chunks = tuple(Chunk(at, sizes, *places[name][at]) for at, sizes in boxes if at in places[name])
            self.contents[name] = TensorRecord(tuple(stored.size), dtype_name(stored.properties.dtype), chunks)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Torch never picks this writer by itself."""
        return False

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if not plan.items:
            return []
        items, headers = in_file_order(plan)

        def resolve(index: int) -> torch.Tensor:
            return resolved(planner, items[index])

        name = shard_name(self.rank)
        self.files[name] = write_shard(
            self.folder / name, headers, resolve, pinned=self._pinned, progress=self._progress
        )
        return results_of(items, headers, name)


def shard_name(rank: int) -> str:
    """The file of a rank's tensors."""
    return f"tensors-{rank:05d}.safetensors"


def in_file_order(plan: SavePlan) -> tuple[list[WriteItem], list[TensorHeader]]:
    """The items of a rank's plan with their header entries in file order: wide elements first, then by name and offset."""
    items = sorted(
        plan.items,
        key=lambda item: (-_data(item).properties.dtype.itemsize, item.index.fqn, _data(item).chunk.offsets),
    )
    return items, [_header_of(item) for item in items]


def resolved(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """The tensor that an item writes."""
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def results_of(items: Sequence[WriteItem], headers: Sequence[TensorHeader], file: str) -> list[WriteResult]:
    """DCP's results for items that lie in `file`."""
    return [
        WriteResult(item.index, header.bytes, (file, header.key)) for item, header in zip(items, headers, strict=True)
    ]


def _box_of(tensors: dict[str, Any], index: MetadataIndex) -> torch.Tensor | None:
    tensor = tensors[index.fqn]
    return tensor.parts.piece(index.offset or ()) if isinstance(tensor, DCPParts) else None


def _data(item: WriteItem) -> Any:
    """What is to be written; plain Python values, which DCP would pickle, are refused."""
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        raise BadInput(
            f"{item.index.fqn} is not a tensor; plain values belong in the checkpoint's state, which is JSON"
        )
    return item.tensor_data


def _check_held(held: set[str], plans: list[SavePlan]) -> None:
    """Raise BadInput for a name that is given only by ranks outside its tensor's mesh."""
    for rank, plan in enumerate(plans):
        absent = next((name for name in plan.planner_data if name not in held), None)
        if absent is not None:
            raise BadInput(f"{absent} is given by rank {rank}, which its mesh leaves out, and by no rank that holds it")


def _piece(rank: int, item: WriteItem) -> RankPiece:
    data = _data(item)
    offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    return RankPiece(rank, item.index.fqn, tuple(data.size), dtype_name(data.properties.dtype), offsets, sizes)


def _volume(item: WriteItem) -> int:
    return math.prod(_data(item).chunk.sizes)


def _header_of(item: WriteItem) -> TensorHeader:
    """A tensor stored whole keeps its name as key, so that a one-rank checkpoint is a plain safetensors file."""
    chunk, data = _data(item).chunk, _data(item)
    whole = tuple(chunk.sizes) == tuple(data.size)
    key = item.index.fqn if whole else f"{item.index.fqn}[{','.join(map(str, chunk.offsets))}]"
    return TensorHeader(key, dtype_name(data.properties.dtype), tuple(chunk.sizes))


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
