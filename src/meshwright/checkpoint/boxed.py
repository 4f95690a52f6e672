"""A tensor of which a rank holds several boxes, as DCP's planner wants to hear of it.

A DTensor says where one box lies. A tensor rank's part of a fused projection is several: rows of the queries, of the keys, of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from meshwright.spec.layout import Box


@dataclass(frozen=True)
class Boxed:
    """The boxes of a tensor of `shape` that lie one after another in the rows of `local`, on one rank."""

    local: Tensor
    boxes: tuple[Box, ...]
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def is_meta(self) -> bool:
        return self.local.is_meta

    def size(self) -> torch.Size:
        return self.shape

    def detach(self) -> Boxed:
        """The same memory without gradients."""
        return Boxed(self.local.detach(), self.boxes, self.shape)

    def box(self, offsets: Sequence[int]) -> Tensor:
        """The elements of the box that begins at `offsets`, sharing memory."""
        found = next(box for box in self.boxes if box.offsets == tuple(offsets))
        return self.local.narrow(0, found.first_row, found.sizes[0])

    # What torch asks of tensors that hold parts (`torch.distributed.checkpoint.planner_helpers`, alike in 2.11 and 2.13).

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes]

    def __create_write_items__(self, name: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]
