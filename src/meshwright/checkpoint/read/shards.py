"""Writes tensors to a safetensors file through two small host buffers, and reads boxes (rectangular parts) of them.

A shard is the file of one rank. It may be larger than the free host memory, so only two buffers of `PIECE_BYTES`
exist: while one is written to disk, the next is filled from the device.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from meshwright.checkpoint.format.files import FileRecord, FileWriter, open_regular, read_range
from meshwright.checkpoint.format.header import ITEM_BYTES, TensorEntry, TensorHeader, encode_header, read_header
from meshwright.spec.errors import BadInput, Damaged

PIECE_BYTES = 64 << 20
"""Bytes that are copied and written at a time: large enough for the disk's full rate, small beside host memory."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Safetensors' name of a dtype; raises BadInput for a dtype that it cannot store."""
    if dtype not in _NAMES:
        raise BadInput(f"{dtype} cannot be stored in a checkpoint; expected one of {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


def write_shard(
    path: Path,
    headers: Sequence[TensorHeader],
    resolve: Callable[[int], Tensor],
    *,
    pinned: bool = False,
    progress: Callable[[int], None] | None = None,
) -> FileRecord:
    """Write a new safetensors file with the tensors of `headers`; it is durable on return.

    `resolve(i)` returns the tensor of `headers[i]`, on any device. It is called once for each, in order; no reference
    to the tensor is kept. `pinned` copies through page-locked memory (for CUDA tensors). `progress` is called with the
    number of bytes of each piece written.
    """
    size = min(PIECE_BYTES, sum(header.bytes for header in headers))
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    tensors = (_checked(header, resolve(index)) for index, header in enumerate(headers))
    with FileWriter(path) as out, ThreadPoolExecutor(1) as pool:
        out.write(encode_header(headers))
        pending: Future[None] | None = None
        for piece in _pieces(tensors, buffers):
            out.digest(piece)
            if pending is not None:
                pending.result()
            pending = pool.submit(out.append, piece)
            if progress is not None:
                progress(len(piece))
        if pending is not None:
            pending.result()
        return out.finish()


class ShardFile:
    """An existing safetensors file with a checked header. Reading is thread-safe. Raises Damaged if it is malformed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        try:
            self.entries = read_header(self._descriptor, path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def entry(self, key: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
        """The entry under `key`; raises Damaged unless it has this dtype and shape."""
        return find_entry(self.entries, key, dtype, shape, self.path)

    def read_box(self, entry: TensorEntry, offsets: Sequence[int], target: Tensor) -> None:
        """Fill `target` with the box of `entry` that begins at `offsets` and has the shape of `target`.

        `target` may have any device, dtype and stride. Whole rows (dimension 0) are read from disk, `PIECE_BYTES` at a
        time; the other dimensions are narrowed in memory.
        """
        if target.numel() == 0:
            return
        shape = entry.shape or (1,)
        box = target if target.dim() else target.unsqueeze(0)
        starts = tuple(offsets) or (0,)
        row_bytes = math.prod(shape[1:]) * ITEM_BYTES[entry.dtype]
        step = max(1, PIECE_BYTES // row_bytes)
        for row in range(0, box.shape[0], step):
            part = box[row : row + step]
            stored = self._read_rows(entry, starts[0] + row, part.shape[0], (len(part), *shape[1:]), part.is_cuda)
            for dim in range(1, box.dim()):
                stored = stored.narrow(dim, starts[dim], box.shape[dim])
            part.copy_(stored)

    def _read_rows(self, entry: TensorEntry, first: int, count: int, shape: tuple[int, ...], pinned: bool) -> Tensor:
        row_bytes = (entry.end - entry.start) // (entry.shape[0] if entry.shape else 1)
        buffer = torch.empty(count * row_bytes, dtype=torch.uint8, pin_memory=pinned)
        start = entry.start + first * row_bytes

        read_range(self._descriptor, buffer.numpy().data, start, self.path)
        return buffer.view(DTYPES[entry.dtype]).view(shape)


def find_entry(
    entries: Mapping[str, TensorEntry], key: str, dtype: str, shape: tuple[int, ...], path: Path
) -> TensorEntry:
    """The entry under `key` of the file `path`; raises Damaged unless it has this dtype and shape."""
    entry = entries.get(key)
    if entry is None or entry.dtype != dtype or entry.shape != shape:
        stored = "nothing" if entry is None else f"{entry.dtype} {entry.shape}"
        raise Damaged(f"{path}: {key!r:.80} should be {dtype} of shape {shape}, the file holds {stored}")
    return entry


def _checked(header: TensorHeader, tensor: Tensor) -> Tensor:
    assert dtype_name(tensor.dtype) == header.dtype and tuple(tensor.shape) == header.shape, (
        header,
        tensor.dtype,
        tensor.shape,
    )
    return tensor


def _pieces(tensors: Iterator[Tensor], buffers: Sequence[Tensor]) -> Iterator[memoryview]:
    """Copy the tensors' bytes one after another into the two buffers, and yield each full buffer.

    The next piece is copied into the other buffer; the one after that overwrites this piece.
    """
    turn, used = 0, 0
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        while data.numel():
            part = data[: buffers[turn].numel() - used]
            buffers[turn][used : used + part.numel()].copy_(part)
            used, data = used + part.numel(), data[part.numel() :]
            if used == buffers[turn].numel():
                yield buffers[turn].numpy().data
                turn, used = 1 - turn, 0
    if used:
        yield buffers[turn].numpy().data[:used]
