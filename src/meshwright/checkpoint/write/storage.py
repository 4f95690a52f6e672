"""Implements the save planner and storage writer interfaces of DCP (`torch.distributed.checkpoint`) for our files.

DCP lists the boxes (rectangular parts) that each rank holds of each tensor, `checkpoint.write.assignment` chooses the rank that
writes each, and `ShardWriter` writes them. The interfaces are the same in torch 2.11 and 2.13:
`torch/distributed/checkpoint/{storage,planner,default_planner,state_dict_saver}.py`. An error during writing is kept in
`failure` instead of raised, because DCP would send the exception to all ranks as a pickle; `CheckpointStore` raises it
on all ranks. Only an invalid plan is raised here, by the first rank.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

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

from meshwright.checkpoint.format.contents import Contents, TensorChunk, TensorRecord
from meshwright.checkpoint.format.files import FileRecord, disk_space_error
from meshwright.checkpoint.format.header import TensorHeader
from meshwright.checkpoint.read.shards import dtype_name, write_shard
from meshwright.checkpoint.write.assignment import RankPiece, assign_writers
from meshwright.checkpoint.write.dcp_parts import DCPParts
from meshwright.spec.errors import BadInput, OutOfResources

FLAT = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""Options of DCP's planner: tensors are passed in one flat mapping by name, so it need not search nested mappings."""


class PiecePlanner(DefaultSavePlanner):
    """Plans a save of tensors with any distribution over ranks; `assign_writers` chooses the writers or raises BadInput."""

    def __init__(self) -> None:
        super().__init__(**FLAT)

    def create_local_plan(self) -> SavePlan:
        """The boxes that this rank holds. `planner_data` has the names of tensors of which it holds nothing."""
        plan = super().create_local_plan()
        names = {item.index.fqn for item in plan.items}
        return dataclasses.replace(plan, planner_data=sorted(self.state_dict.keys() - names))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign each piece to one rank. Raises BadInput when the pieces of all ranks do not cover a tensor."""
        chosen = assign_writers(_piece(rank, item) for rank, plan in enumerate(all_plans) for item in plan.items)
        _check_every_name_stored({piece.name for piece in chosen}, all_plans)
        plans = [
            SavePlan([item for item in plan.items if _piece(rank, item) in chosen])
            for rank, plan in enumerate(all_plans)
        ]
        self.global_plan, self.metadata = create_default_global_save_plan(plans)
        return self.global_plan, self.metadata

    def lookup_object(self, index: MetadataIndex) -> Any:
        box = _box_of(self.state_dict, index)
        return super().lookup_object(index) if box is None else box


class ShardWriter(StorageWriter):
    """Writes this rank's items of a save plan to the file `tensors-<rank>.safetensors`; no file without items."""

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
        """Compare the bytes that all ranks will write with the free disk space; the plan carries an error to the ranks."""
        needed_bytes = sum(
            _element_count(item) * _tensor_data(item).properties.dtype.itemsize for plan in plans for item in plan.items
        )
        error = disk_space_error(self.folder.parent, needed_bytes)
        return [dataclasses.replace(plan, storage_data=error) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        try:
            results = self._write(plan, planner)
        except Exception as error:
            self.failure = error
        return _completed_future(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank: record the file and key of every chunk in `contents`.

        This does not commit the checkpoint; `CheckpointStore` does so after every rank has reported.
        """
        locations: dict[str, dict[tuple[int, ...], tuple[str, str]]] = defaultdict(dict)
        """Tensor name → offsets of a chunk → (file, key)."""
        for result in chain.from_iterable(results):
            locations[result.index.fqn][tuple(result.index.offset or ())] = result.storage_data
        for name, stored in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(stored, TensorStorageMetadata)
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
            chunks = tuple(
                TensorChunk(offsets, sizes, *locations[name][offsets])
                for offsets, sizes in boxes
                if offsets in locations[name]
            )
            self.contents[name] = TensorRecord(tuple(stored.size), dtype_name(stored.properties.dtype), chunks)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False, so that DCP never chooses this writer by itself."""
        return False

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if plan.storage_data is not None:
            raise OutOfResources(plan.storage_data)
        if not plan.items:
            return []
        items, headers = order_items(plan)

        def resolve(index: int) -> torch.Tensor:
            tensor = resolve_tensor(planner, items[index])
            state = cast(DefaultSavePlanner, planner).state_dict[items[index].index.fqn]
            encoded = state.parts.encoded if isinstance(state, DCPParts) else None
            return tensor if encoded is None else encoded.read(tensor)

        name = shard_name(self.rank)
        self.files[name] = write_shard(
            self.folder / name, headers, resolve, pinned=self._pinned, progress=self._progress
        )
        return write_results(items, headers, name)


def shard_name(rank: int) -> str:
    """The name of the file with a rank's tensors."""
    return f"tensors-{rank:05d}.safetensors"


def order_items(plan: SavePlan) -> tuple[list[WriteItem], list[TensorHeader]]:
    """The items of a rank's plan and their header entries in file order: by element size, largest first, name and offsets."""
    items = sorted(
        plan.items,
        key=lambda item: (
            -_tensor_data(item).properties.dtype.itemsize,
            item.index.fqn,
            _tensor_data(item).chunk.offsets,
        ),
    )
    return items, [_header_of(item) for item in items]


def resolve_tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """The tensor that an item writes; of encoded state the part on the meta device."""
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def write_results(items: Sequence[WriteItem], headers: Sequence[TensorHeader], file: str) -> list[WriteResult]:
    """The results that DCP expects for items written to `file`."""
    return [
        WriteResult(item.index, header.bytes, (file, header.key)) for item, header in zip(items, headers, strict=True)
    ]


def _box_of(tensors: dict[str, Any], index: MetadataIndex) -> torch.Tensor | None:
    tensor = tensors[index.fqn]
    return tensor.parts.piece(index.offset or ()) if isinstance(tensor, DCPParts) else None


def _tensor_data(item: WriteItem) -> Any:
    """Tensor data of an item; raises BadInput for a plain Python value, which DCP would pickle."""
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        raise BadInput(
            f"{item.index.fqn} is not a tensor; plain values belong in the checkpoint's state, which is JSON"
        )
    return item.tensor_data


def _check_every_name_stored(stored: set[str], plans: list[SavePlan]) -> None:
    """Raise BadInput for a name that only ranks outside its tensor's device mesh gave."""
    for rank, plan in enumerate(plans):
        absent = next((name for name in plan.planner_data if name not in stored), None)
        if absent is not None:
            raise BadInput(f"{absent} is given by rank {rank}, which its mesh leaves out, and by no rank that holds it")


def _piece(rank: int, item: WriteItem) -> RankPiece:
    data = _tensor_data(item)
    offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    return RankPiece(rank, item.index.fqn, tuple(data.size), dtype_name(data.properties.dtype), offsets, sizes)


def _element_count(item: WriteItem) -> int:
    return math.prod(_tensor_data(item).chunk.sizes)


def _header_of(item: WriteItem) -> TensorHeader:
    """The header entry of an item. The key is the tensor's name, followed by `[offsets]` for a part of a tensor.

    So a checkpoint of one rank is a safetensors file with the usual keys.
    """
    chunk, data = _tensor_data(item).chunk, _tensor_data(item)
    whole = tuple(chunk.sizes) == tuple(data.size)
    key = item.index.fqn if whole else f"{item.index.fqn}[{','.join(map(str, chunk.offsets))}]"
    return TensorHeader(key, dtype_name(data.properties.dtype), tuple(chunk.sizes))


def _completed_future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
