"""The safetensors header, written and read by hand: 8 bytes of length, a JSON table, then raw little-endian tensors
without gaps.

Format: https://github.com/huggingface/safetensors. Writing it ourselves lets shards stream to disk one tensor at a
time; reading it ourselves lets every number be checked before it is used. Torch-free.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files import parse_json, read_range
from meshwright.spec.errors import BadInput, Damaged

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes of one element by safetensors' dtype name."""

HEADER_LIMIT = 16 << 20
ENTRY_LIMIT = 200_000
_DIMENSION_LIMIT = 16
_SIZE_LIMIT = 1 << 60


@dataclass(frozen=True)
class TensorHeader:
    """One tensor to be stored: its key in the file, dtype name and shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Entry:
    """One stored tensor: dtype name, shape, and its bytes `start` to `end` counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def encode_header(headers: Sequence[TensorHeader]) -> bytes:
    """Everything before the first tensor's bytes, for tensors stored in the order of `headers`.

    Wide elements should come first, so that every tensor is aligned to its own element size.
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


def read_header(descriptor: int, path: Path, vouch: Callable[[int, int], None]) -> dict[str, Entry]:
    """The table of the safetensors file open at `descriptor`; raises Damaged when any of it is not as the format says.

    `vouch(start, end)` is called before bytes are used, and raises when they are known to be wrong.
    """
    size = os.fstat(descriptor).st_size
    vouch(0, min(8, size))
    return parse_header(header_bytes(descriptor, path, lambda length: vouch(8, length)), size, path)


def header_bytes(descriptor: int, path: Path, vouch: Callable[[int], None] = lambda length: None) -> bytes:
    """All bytes before the first tensor. `vouch` is called with the length before more than 8 bytes are read."""
    size = os.fstat(descriptor).st_size
    prefix = bytearray(8)
    read_range(descriptor, prefix, 0, path)
    length = int.from_bytes(prefix, "little")
    if length > min(HEADER_LIMIT, size - 8):
        raise Damaged(f"{path}: a header of {length} bytes does not fit (file: {size} bytes, limit: {HEADER_LIMIT})")
    vouch(8 + length)
    text = bytearray(length)
    read_range(descriptor, text, 8, path)
    return bytes(prefix + text)


def parse_header(head: bytes, size: int, path: Path) -> dict[str, Entry]:
    """The table in `head`, the `header_bytes` of a file of `size` bytes; raises Damaged if it violates the format."""
    if len(head) < 8 or len(head) != 8 + int.from_bytes(head[:8], "little") or len(head) > 8 + HEADER_LIMIT:
        raise Damaged(f"{path}: the header does not fit (file: {size} bytes, limit: {HEADER_LIMIT})")
    table = parse_json(head[8:], path)
    if not isinstance(table, dict) or len(table) > ENTRY_LIMIT:
        raise Damaged(f"{path}: the header is not a table of at most {ENTRY_LIMIT} tensors")
    entries = {key: _entry(key, value, len(head), path) for key, value in table.items() if key != "__metadata__"}
    _check_offsets(entries, len(head), size, path)
    return entries


def whole_numbers(value: Any) -> tuple[int, ...] | None:
    """`value` as offsets read from JSON, or None when it is not a short list of whole numbers."""
    if not isinstance(value, list) or len(value) > _DIMENSION_LIMIT:
        return None
    good = all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < _SIZE_LIMIT for each in value)
    return tuple(value) if good else None


def sizes(value: Any) -> tuple[int, ...] | None:
    """`value` as a shape read from JSON, or None when it is not whole numbers whose product is sane."""
    numbers = whole_numbers(value)
    return numbers if numbers is not None and math.prod(numbers) < _SIZE_LIMIT else None


def _entry(key: str, value: Any, data: int, path: Path) -> Entry:
    value = value if isinstance(value, dict) else {}
    shape, span, dtype = sizes(value.get("shape")), whole_numbers(value.get("data_offsets")), value.get("dtype")
    if shape is None or span is None or len(span) != 2 or not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise Damaged(f"{path}: {key!r:.80} lacks a known dtype, a shape or its offsets")
    if span[1] - span[0] != math.prod(shape) * ITEM_BYTES[dtype]:
        raise Damaged(f"{path}: {key!r:.80} has shape {shape} of {dtype} but {span[1] - span[0]} bytes")
    return Entry(dtype, shape, data + span[0], data + span[1])


def _check_offsets(entries: dict[str, Entry], data: int, size: int, path: Path) -> None:
    """Tensors follow each other without gap or overlap from the header's end to the file's."""
    at = data
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            raise Damaged(f"{path}: {key!r:.80} starts at byte {entry.start}, where {at} was expected")
        at = entry.end
    if at != size:
        raise Damaged(f"{path}: the tensors end at byte {at}, the file at {size}")
