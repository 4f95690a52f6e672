"""Writes state directly from where it is, while it does not change, through two small host buffers.

A rank's file may be larger than the free host memory, so that no snapshot fits. While one buffer is written to disk, the
other one is filled from the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.format.files import BLOCK_BYTES, FileRecord
from meshwright.checkpoint.format.header import TensorHeader, encode_header
from meshwright.checkpoint.local_tensors import dtype_name
from meshwright.checkpoint.write.file_writer import Window, write_file

WINDOW_BLOCKS = 4
"""Blocks of a buffer, and threads that write them. They reach the disk's full rate, and use little host memory."""


def write_tensors(
    path: Path, headers: Sequence[TensorHeader], tensors: Iterable[Tensor], *, pinned: bool = False
) -> FileRecord:
    """Write `tensors`, which `headers` describe, as a new safetensors file. On return it is durable.

    Tensors may be on any device. Each one is taken from the iterable when its turn comes, and no reference to it is kept.
    With `pinned` they are copied through page-locked memory (for CUDA tensors).
    """
    matching = (_checked(header, tensor) for header, tensor in zip(headers, tensors, strict=True))
    size = sum(header.bytes for header in headers)
    return write_file(path, _windows(encode_header(headers), matching, size, pinned), WINDOW_BLOCKS)


def _checked(header: TensorHeader, tensor: Tensor) -> Tensor:
    assert dtype_name(tensor.dtype) == header.dtype and tuple(tensor.shape) == header.shape, (
        header,
        tensor.dtype,
        tensor.shape,
    )
    return tensor


def _windows(header: bytes, tensors: Iterable[Tensor], size: int, pinned: bool) -> Iterator[Window]:
    """Yield windows with the header and the bytes of `tensors` (`size` in all), copied into two buffers in turn."""
    buffer_bytes = min(WINDOW_BLOCKS * BLOCK_BYTES, len(header) + size)
    buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    turn = 0
    used = 0
    for tensor in chain([torch.frombuffer(bytearray(header), dtype=torch.uint8)], tensors):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        while data.numel():
            part = data[: buffer_bytes - used]
            buffers[turn][used : used + part.numel()].copy_(part)
            used += part.numel()
            data = data[part.numel() :]
            if used == buffer_bytes:
                yield [buffers[turn].numpy().data]
                turn = 1 - turn
                used = 0
    if used:
        yield [buffers[turn].numpy().data[:used]]
