"""Memory of one engine that another maps, on a CPU: files without a name in the place of device memory."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from meshwright.parallel import mapped_memory
from meshwright.parallel.mapped_memory import ExportedMemory, NotMappable
from meshwright.serve import kv_cache, mapped_blocks

OFFSET = 64
"""Byte of its file at which a tensor starts."""


class EmulatedMapping:
    """Caches in files, which engines of the test's process map a second time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._files: dict[int, int] = {}
        """Descriptors by address of their tensor."""
        self.mapped = 0
        """Mappings that are open now."""
        self.refused = False
        """Whether mappings fail."""
        monkeypatch.setattr(kv_cache, "zeros", self._zeros)
        monkeypatch.setattr(mapped_memory, "mappable", lambda device: True)
        monkeypatch.setattr(mapped_memory, "export", self._export)
        monkeypatch.setattr(mapped_blocks, "MappedMemory", self._map)

    def _zeros(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        size, descriptor = math.prod(shape) * dtype.itemsize, os.memfd_create("cache")
        os.ftruncate(descriptor, OFFSET + size)
        memory = torch.frombuffer(mmap.mmap(descriptor, OFFSET + size), dtype=torch.uint8)[OFFSET:]
        self._files[memory.data_ptr()] = descriptor
        return memory.view(dtype).view(tuple(shape))

    def _export(self, tensor: Tensor) -> ExportedMemory:
        return ExportedMemory(self._files[tensor.data_ptr()].to_bytes(64, "big"), OFFSET)

    def _map(self, exported: ExportedMemory, size: int, device: torch.device) -> EmulatedMemory:
        if self.refused:
            raise NotMappable
        return EmulatedMemory(self, int.from_bytes(exported.handle, "big"), exported.offset, size)

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._files.values():
            os.close(descriptor)


class EmulatedMemory:
    """A second mapping of a file."""

    def __init__(self, mapping: EmulatedMapping, descriptor: int, offset: int, size: int) -> None:
        self._mapping, self._memory = mapping, mmap.mmap(descriptor, offset + size)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.address = self._tensor.data_ptr() + offset
        mapping.mapped += 1

    def close(self) -> None:
        self._mapping.mapped -= 1
