"""Adapter that lets DCP (`torch.distributed.checkpoint`) save `StateParts`, a rank's parts of one state tensor.

DCP accepts a DTensor, which describes one box (rectangular part) per rank. With tensor parallelism a rank can hold
several boxes of a fused projection: rows of the queries, of the keys and of the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from meshwright.state.parts import StateParts


@dataclass(frozen=True)
class DCPParts:
    """`StateParts` with the methods that DCP's save planner calls on distributed tensors.

    Source: `torch/distributed/checkpoint/planner_helpers.py`, which is the same in torch 2.11 and 2.13.
    """

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
