"""Writes and parses the header of a safetensors file: its length in 8 bytes, then a JSON table of the tensors.

The tensors follow the header as raw little-endian bytes without gaps. Format: https://github.com/huggingface/safetensors.
This module has a writer of its own, so that a file can be written to disk one tensor at a time. It also has a parser of its
own, which checks every number before it is used.

This module does not import torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.format.files import open_regular, read_range
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.folder_files import parse_json

ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
"""Bytes of one element, by safetensors' dtype name."""

HEADER_LIMIT = 16 << 20
"""Largest JSON table that is read or written, in bytes."""
ENTRY_LIMIT = 200_000
"""Maximum number of tensors of a file that is read."""
_DIMENSION_LIMIT = 16
_SIZE_LIMIT = 1 << 60
"""Upper bound of an offset, of a size, and of the number of elements of a tensor."""


@dataclass(frozen=True)
class TensorHeader:
    """A tensor that will be stored: its key in the file, safetensors' dtype name (such as `F32`), and its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorEntry:
    """A stored tensor: safetensors' dtype name, shape, and its bytes [start, end) in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def encode_header(headers: Sequence[TensorHeader]) -> bytes:
    """Return the file's bytes before the first tensor. The tensors are stored in the order of `headers`.

    Pass dtypes with larger elements first, so that every tensor is aligned to its element size.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for header in headers:
        table[header.key] = {
            "dtype": header.dtype,
            "shape": list(header.shape),
            "data_offsets": [end, end + header.bytes],
        }
        end += header.bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise BadInput(
            f"{len(headers)} tensors need a header of {len(text)} bytes in one file; at most {HEADER_LIMIT} are read back"
        )
    return len(text).to_bytes(8, "little") + text


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """Return the entries of a safetensors file by key. Raises Damaged if the file violates the format."""
    descriptor = open_regular(path)
    try:
        return parse_header(read_header_bytes(descriptor, path), os.fstat(descriptor).st_size, path)
    finally:
        os.close(descriptor)


def read_header_bytes(descriptor: int, path: Path) -> bytes:
    """Return the file's bytes before the first tensor. Raises Damaged if their length exceeds the file or `HEADER_LIMIT`."""
    size = os.fstat(descriptor).st_size
    prefix = bytearray(8)
    read_range(descriptor, prefix, 0, path)
    length = int.from_bytes(prefix, "little")
    if length > min(HEADER_LIMIT, size - 8):
        raise Damaged(f"{path}: a header of {length} bytes does not fit (file: {size} bytes, limit: {HEADER_LIMIT})")
    text = bytearray(length)
    read_range(descriptor, text, 8, path)
    return bytes(prefix + text)


def parse_header(header: bytes, file_bytes: int, path: Path) -> dict[str, TensorEntry]:
    """Return the entries, by key, that `header` describes. `header` is the result of `read_header_bytes`.

    `file_bytes` is the size of the file. Raises Damaged if the header violates the format; the message names `path`.
    """
    if len(header) < 8 or len(header) != 8 + int.from_bytes(header[:8], "little") or len(header) > 8 + HEADER_LIMIT:
        raise Damaged(f"{path}: the header does not fit (file: {file_bytes} bytes, limit: {HEADER_LIMIT})")
    table = parse_json(header[8:], path, own=True)
    if not isinstance(table, dict) or len(table) > ENTRY_LIMIT:
        raise Damaged(f"{path}: the header is not a table of at most {ENTRY_LIMIT} tensors")
    entries = {
        key: _parse_entry(key, value, len(header), path) for key, value in table.items() if key != "__metadata__"
    }
    _check_no_gaps(entries, len(header), file_bytes, path)
    return entries


def find_entry(
    entries: Mapping[str, TensorEntry], key: str, dtype: str, shape: tuple[int, ...], path: Path
) -> TensorEntry:
    """Return the entry under `key` of the file `path`. Raises Damaged unless it has this dtype and shape."""
    entry = entries.get(key)
    if entry is None or entry.dtype != dtype or entry.shape != shape:
        stored = "nothing" if entry is None else f"{entry.dtype} {entry.shape}"
        raise Damaged(f"{path}: {key!r:.80} should be {dtype} of shape {shape}, the file holds {stored}")
    return entry


def parse_offsets(value: Any) -> tuple[int, ...] | None:
    """Return offsets from a JSON value; None unless it is a list of at most 16 whole numbers below 2^60."""
    if not isinstance(value, list) or len(value) > _DIMENSION_LIMIT:
        return None
    valid = all(
        isinstance(number, int) and not isinstance(number, bool) and 0 <= number < _SIZE_LIMIT for number in value
    )
    return tuple(value) if valid else None


def parse_shape(value: Any) -> tuple[int, ...] | None:
    """Return a shape from a JSON value; None unless `parse_offsets` accepts it and it has fewer than 2^60 elements."""
    numbers = parse_offsets(value)
    return numbers if numbers is not None and math.prod(numbers) < _SIZE_LIMIT else None


def _parse_entry(key: str, value: Any, data_start: int, path: Path) -> TensorEntry:
    """Return the entry in a JSON value. Its offsets count from byte `data_start` of the file, the end of the header."""
    value = value if isinstance(value, dict) else {}
    shape = parse_shape(value.get("shape"))
    span = parse_offsets(value.get("data_offsets"))
    dtype = value.get("dtype")
    if shape is None or span is None or len(span) != 2 or not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise Damaged(f"{path}: {key!r:.80} lacks a known dtype, a shape or its offsets")
    if span[1] - span[0] != math.prod(shape) * ITEM_BYTES[dtype]:
        raise Damaged(f"{path}: {key!r:.80} has shape {shape} of {dtype} but {span[1] - span[0]} bytes")
    return TensorEntry(dtype, shape, data_start + span[0], data_start + span[1])


def _check_no_gaps(entries: dict[str, TensorEntry], data_start: int, file_bytes: int, path: Path) -> None:
    """Raise Damaged unless the tensors follow each other without gap or overlap up to the end of the file."""
    expected = data_start
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != expected:
            raise Damaged(f"{path}: {key!r:.80} starts at byte {entry.start}; expected {expected}")
        expected = entry.end
    if expected != file_bytes:
        raise Damaged(f"{path}: the tensors end at byte {expected}, the file at {file_bytes}")
