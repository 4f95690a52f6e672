"""`metadata.json`: which tensors a checkpoint holds, and where each piece of each one lies.

It takes the place of DCP's pickled `.metadata`. Reading trusts nothing: names, sizes and offsets are checked, and the
pieces of a tensor must fill it exactly, without overlap. Torch-free.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.boxes import exceeds, overlapping, volume
from meshwright.checkpoint.files import parse_json, plain_name
from meshwright.checkpoint.header import ITEM_BYTES, sizes, whole_numbers
from meshwright.checkpoint.manifest import CONTENTS, FORMAT, Manifest, read_manifest
from meshwright.checkpoint.verify import Vouched
from meshwright.spec.errors import Damaged

_CONTENTS_LIMIT = 1 << 30
_NAME_LIMIT = 1024


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, stored whole under `key` in `file`; `offsets` and `sizes` count elements per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class TensorRecord:
    """A stored tensor: global shape, safetensors dtype name, and the chunks that make it up."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Contents = dict[str, TensorRecord]
"""Tensor name → where it is."""


def encode_contents(contents: Contents) -> bytes:
    """The bytes of `metadata.json`."""
    tensors = {name: asdict(record) for name, record in contents.items()}
    return (json.dumps({"format": FORMAT, "tensors": tensors}) + "\n").encode()


def read_checkpoint(path: Path) -> Contents:
    """The tensors of the checkpoint in folder `path`, by name; their values are neither read nor verified.

    Raises Damaged when the folder is not committed or its `metadata.json` is not what was written or makes no sense.
    """
    return read_contents(Vouched(path, read_manifest(path)))


def read_contents(vouched: Vouched) -> Contents:
    """`read_checkpoint` for a manifest already read."""
    where = vouched.path / CONTENTS
    if CONTENTS not in vouched.manifest.files:
        raise Damaged(f"{vouched.path} has no {CONTENTS}")
    return parse_contents(vouched.small(CONTENTS, _CONTENTS_LIMIT), where, vouched.manifest)


def parse_contents(text: bytes, where: Path, manifest: Manifest) -> Contents:
    """The tensors in `text`, which is the file `where` of a checkpoint with this manifest; raises Damaged."""
    data = parse_json(text, where)
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("tensors"), dict):
        raise Damaged(f"{where}: not a table of tensors of format {FORMAT}")
    return {name: _record(name, entry, where, manifest) for name, entry in data["tensors"].items()}


def check_record(name: str, record: TensorRecord, where: Path) -> None:
    """Raise Damaged unless the chunks lie inside the tensor, do not overlap and fill it."""
    for chunk in record.chunks:
        if exceeds(chunk, record.shape):
            raise Damaged(
                f"{where}: a chunk of {name} at {chunk.offsets} of size {chunk.sizes} leaves its shape {record.shape}"
            )
    if volume(record.chunks) != math.prod(record.shape) or overlapping(record.chunks):
        raise Damaged(f"{where}: the chunks of {name} do not fill its shape {record.shape} exactly once")


def _record(name: str, entry: Any, where: Path, manifest: Manifest) -> TensorRecord:
    if not 0 < len(name) <= _NAME_LIMIT or not name.isprintable():
        raise Damaged(f"{where}: {name[:80]!r} is not a tensor name")
    entry = entry if isinstance(entry, dict) else {}
    shape, dtype, chunks = sizes(entry.get("shape")), entry.get("dtype"), entry.get("chunks")
    if shape is None or not isinstance(dtype, str) or dtype not in ITEM_BYTES or not isinstance(chunks, list):
        raise Damaged(f"{where}: {name} lacks a shape, a known dtype or its chunks")
    record = TensorRecord(shape, dtype, tuple(_chunk(name, each, len(shape), where, manifest) for each in chunks))
    check_record(name, record, where)
    return record


def _chunk(name: str, entry: Any, dimensions: int, where: Path, manifest: Manifest) -> Chunk:
    entry = entry if isinstance(entry, dict) else {}
    offsets, size, key = whole_numbers(entry.get("offsets")), sizes(entry.get("sizes")), entry.get("key")
    if (
        offsets is None
        or size is None
        or len(offsets) != dimensions
        or len(size) != dimensions
        or not isinstance(key, str)
    ):
        raise Damaged(f"{where}: a chunk of {name} lacks offsets, sizes or key for {dimensions} dimensions")
    file = plain_name(entry.get("file"))
    if file is None or file not in manifest.files:
        raise Damaged(
            f"{where}: a chunk of {name} lies in {entry.get('file')!r:.80}, which is not a file of this checkpoint"
        )
    return Chunk(offsets, size, file, key)
