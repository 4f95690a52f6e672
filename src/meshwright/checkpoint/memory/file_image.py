"""Presents the data of a snapshot buffer as a safetensors file that can be read by blocks. No file is written.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.checkpoint.format.files import BLOCK_BYTES
from meshwright.checkpoint.format.header import TensorHeader, encode_header


class FileImage:
    """The safetensors file of some tensors whose bytes lie one after another in `data`.

    `headers` has (key, dtype, shape) of each tensor, in the order of the data.
    """

    def __init__(self, headers: Sequence[Any], data: memoryview) -> None:
        tensors = [TensorHeader(key, dtype, tuple(shape)) for key, dtype, shape in headers]
        self.header = encode_header(tensors) if tensors else b""
        self.data = data[: sum(tensor.bytes for tensor in tensors)]

    @property
    def bytes(self) -> int:
        return len(self.header) + len(self.data)

    @property
    def blocks(self) -> int:
        """Number of blocks. Each has `BLOCK_BYTES` bytes, the last one may have fewer."""
        return -(-self.bytes // BLOCK_BYTES)

    def block(self, index: int) -> memoryview:
        """Return block `index`: a view of the data, or a copy if it contains bytes of the header."""
        start = index * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self.bytes)
        if start >= len(self.header):
            return self.data[start - len(self.header) : end - len(self.header)]
        copy = memoryview(bytearray(end - start))
        self.read(start, copy)
        return copy

    def data_of_block(self, index: int) -> tuple[int, memoryview]:
        """Return the data (not the header) in block `index`: its offset in `data`, and a view of it."""
        start = max(0, index * BLOCK_BYTES - len(self.header))
        return start, self.data[start : max(0, (index + 1) * BLOCK_BYTES - len(self.header))]

    def read(self, start: int, target: memoryview) -> None:
        """Fill `target` with the file's bytes from `start` on."""
        header = self.header[start : start + len(target)]
        target[: len(header)] = header
        # Offset in the data of the first byte after the header's part.
        first = start + len(header) - len(self.header)
        target[len(header) :] = self.data[first : first + len(target) - len(header)]
