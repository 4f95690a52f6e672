"""`StateParts` as DCP's planner wants to hear of it.

A DTensor says where one box lies. A tensor rank's part of a fused projection is several: rows of the queries, of the keys, of the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from meshwright.state.parts import StateParts


@dataclass(frozen=True)
class Boxed:
    """What torch asks of tensors that hold parts (`torch.distributed.checkpoint.planner_helpers`, alike in 2.11 and 2.13)."""

    parts: StateParts

    def size(self) -> torch.Size:
        return torch.Size(self.parts.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.parts.boxes]

    def __create_write_items__(self, name: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.parts.local)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]
