"""Reads and writes `metadata.json`: the tensors of a checkpoint, and the file and key of each of their chunks.

A chunk is a box (rectangular part) of a tensor. It is stored as one entry of a safetensors file. The reader checks all
names, sizes and offsets, and that the chunks of a tensor cover it without overlap.

This module does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.format.boxes import count_elements, exceeds_shape, find_overlap
from meshwright.checkpoint.format.files import plain_name
from meshwright.checkpoint.format.header import ITEM_BYTES, parse_offsets, parse_shape
from meshwright.checkpoint.format.manifest import CONTENTS, FORMAT, CheckpointManifest, check_format
from meshwright.checkpoint.format.verify import read_verified
from meshwright.spec.errors import Damaged
from meshwright.spec.folder_files import parse_json

CONTENTS_LIMIT = 1 << 30
"""Largest `metadata.json` that is read, in bytes."""
_NAME_LIMIT = 1024
"""Longest tensor name, in characters."""


@dataclass(frozen=True)
class TensorChunk:
    """A box of a tensor, stored under `key` in `file`.

    `offsets` is the index of its first element and `sizes` its shape, both in elements per dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class TensorRecord:
    """A stored tensor: its global shape, safetensors' dtype name (such as `F32`), and the chunks that cover it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[TensorChunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Contents = dict[str, TensorRecord]
"""The record of each tensor, by the tensor's name."""


def encode_contents(contents: Contents) -> bytes:
    """Return the bytes of `metadata.json`."""
    return (json.dumps({"format": FORMAT, "tensors": plain_contents(contents)}) + "\n").encode()


def plain_contents(contents: Contents) -> dict[str, Any]:
    """Return `contents` as values that JSON can store."""
    return {name: asdict(record) for name, record in contents.items()}


def contents_of(plain: Mapping[str, Any]) -> Contents:
    """Return the contents from the values of `plain_contents`. This program wrote them, so they are not checked."""
    return {
        name: TensorRecord(
            tuple(entry["shape"]),
            entry["dtype"],
            tuple(
                TensorChunk(tuple(chunk["offsets"]), tuple(chunk["sizes"]), chunk["file"], chunk["key"])
                for chunk in entry["chunks"]
            ),
        )
        for name, entry in plain.items()
    }


def read_contents(path: Path, manifest: CheckpointManifest) -> Contents:
    """Return the tensors of the checkpoint in folder `path`, by name. Their values are neither read nor verified.

    Raises Damaged when its `metadata.json` is missing, invalid, or does not match its digests.
    """
    if CONTENTS not in manifest.files:
        raise Damaged(f"{path} has no {CONTENTS}")
    return parse_contents(read_verified(path, manifest, CONTENTS, CONTENTS_LIMIT), path / CONTENTS, manifest)


def parse_contents(text: bytes, where: Path, manifest: CheckpointManifest) -> Contents:
    """Parse `text`, the contents of the file `where` of a checkpoint with this manifest. Raises Damaged if it is invalid."""
    data = parse_json(text, where, own=True)
    check_format(data, where.parent, where.name)
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("tensors"), dict):
        raise Damaged(f"{where}: not a table of tensors of format {FORMAT}")
    return {name: _parse_record(name, entry, where, manifest) for name, entry in data["tensors"].items()}


def check_record(name: str, record: TensorRecord, where: Path) -> None:
    """Raise Damaged unless the chunks lie inside the tensor, do not overlap, and cover it.

    The message begins with `where`, the file that has the record.
    """
    for chunk in record.chunks:
        if exceeds_shape(chunk, record.shape):
            raise Damaged(
                f"{where}: a chunk of {name} at {chunk.offsets} of size {chunk.sizes} exceeds its shape {record.shape}"
            )
    if count_elements(record.chunks) != math.prod(record.shape) or find_overlap(record.chunks):
        raise Damaged(f"{where}: the chunks of {name} do not fill its shape {record.shape} exactly once")


def _parse_record(name: str, entry: Any, where: Path, manifest: CheckpointManifest) -> TensorRecord:
    """Return the record of tensor `name` in the JSON value `entry`. Raises Damaged if it is invalid."""
    if not 0 < len(name) <= _NAME_LIMIT or not name.isprintable():
        raise Damaged(f"{where}: {name[:80]!r} is not a tensor name")
    entry = entry if isinstance(entry, dict) else {}
    shape = parse_shape(entry.get("shape"))
    dtype = entry.get("dtype")
    chunks = entry.get("chunks")
    if shape is None or not isinstance(dtype, str) or dtype not in ITEM_BYTES or not isinstance(chunks, list):
        raise Damaged(f"{where}: {name} lacks a shape, a known dtype or its chunks")
    record = TensorRecord(
        shape, dtype, tuple(_parse_chunk(name, chunk, len(shape), where, manifest) for chunk in chunks)
    )
    check_record(name, record, where)
    return record


def _parse_chunk(name: str, entry: Any, dimensions: int, where: Path, manifest: CheckpointManifest) -> TensorChunk:
    """Return the chunk in the JSON value `entry`, a chunk of a tensor with this many dimensions. Raises Damaged if it is invalid."""
    entry = entry if isinstance(entry, dict) else {}
    offsets = parse_offsets(entry.get("offsets"))
    sizes = parse_shape(entry.get("sizes"))
    key = entry.get("key")
    if (
        offsets is None
        or sizes is None
        or len(offsets) != dimensions
        or len(sizes) != dimensions
        or not isinstance(key, str)
    ):
        raise Damaged(f"{where}: a chunk of {name} lacks offsets, sizes or key for {dimensions} dimensions")
    file = plain_name(entry.get("file"))
    if file is None or file not in manifest.files:
        raise Damaged(
            f"{where}: a chunk of {name} lies in {entry.get('file')!r:.80}, which is not a file of this checkpoint"
        )
    return TensorChunk(offsets, sizes, file, key)
