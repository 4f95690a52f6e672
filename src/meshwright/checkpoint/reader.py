"""Whole tensors out of a checkpoint, in one process and without a process group: for export, evaluation and fresh
starts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.block_reader import BlockFiles
from meshwright.checkpoint.contents import Chunk, TensorRecord, parse_contents
from meshwright.checkpoint.files import BLOCK_BYTES, plain_name
from meshwright.checkpoint.fill import Destination
from meshwright.checkpoint.header import Entry, parse_header
from meshwright.checkpoint.manifest import CONTENTS, STATE, DamagedCheckpoint, read_manifest
from meshwright.checkpoint.shards import DTYPES, entry_of
from meshwright.checkpoint.state import decode_state
from meshwright.checkpoint.verify import check_sizes, read_verified
from meshwright.spec.errors import BadInput, Damaged, nearest

_TEXT_LIMIT = 256 << 20
_CONTENTS_LIMIT = 1 << 30
CACHED_BLOCKS = 4
"""Blocks of 16 MiB that an open reader keeps."""


class CheckpointReader:
    """A committed checkpoint opened for reading; use it as a context manager, or `close` it.

    Whatever is read is verified first, block by block, so a rank that needs a few rows pays for a few rows. The last few blocks stay in
    memory (`CACHED_BLOCKS`), so reading rows in order reads each block once. Not thread-safe. Raises Damaged when something does not match
    what was written, BadInput when `path` is not a folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        damage = check_sizes(path, self.manifest)
        if damage:
            raise DamagedCheckpoint(path, damage)
        self._files = BlockFiles(path, self.manifest)
        self._entries: dict[str, dict[str, Entry]] = {}
        self._blocks: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        text = read_verified(path, self.manifest, CONTENTS, _CONTENTS_LIMIT) if CONTENTS in self.manifest.files else b""
        self.tensors: dict[str, TensorRecord] = parse_contents(text, path / CONTENTS, self.manifest)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()
        self._blocks.clear()

    def names(self, prefix: str = "") -> Iterator[str]:
        """The tensors whose name starts with `prefix`."""
        return (name for name in self.tensors if name.startswith(prefix))

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU, in its stored dtype."""
        record = self.record(name)
        if record.shape:
            return self.read_rows(name, 0, record.shape[0])
        target = torch.empty((), dtype=DTYPES[record.dtype])
        for chunk in record.chunks:
            self._fill(record, chunk, (), target)
        return target

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of dimension 0, on the CPU, in the stored dtype; only these are read from disk."""
        record = self.record(name)
        if not record.shape or not 0 <= start <= stop <= record.shape[0]:
            raise BadInput(f"{self.path}: {name} has shape {record.shape}; rows {start} to {stop} are not in it")
        target = torch.empty((stop - start, *record.shape[1:]), dtype=DTYPES[record.dtype])
        for chunk in record.chunks:
            first, last = max(start, chunk.offsets[0]), min(stop, chunk.offsets[0] + chunk.sizes[0])
            if first >= last:
                continue
            box = target[first - start : last - start]
            for dim in range(1, len(record.shape)):
                box = box.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
            self._fill(record, chunk, (first - chunk.offsets[0], *(0 for _ in chunk.sizes[1:])), box)
        return target

    def state(self) -> dict[str, Any]:
        """What `state.json` holds."""
        return decode_state(self._bytes(STATE), self.path / STATE)

    def text(self, name: str) -> str:
        """One of the texts saved beside the tensors, such as `config.yaml`."""
        try:
            return self._bytes(name).decode("utf-8")
        except UnicodeDecodeError as error:
            raise Damaged(f"{self.path / name} is not UTF-8: {error}") from error

    def _bytes(self, name: str) -> bytes:
        if plain_name(name) is None or name not in self.manifest.files:
            raise BadInput(f"{self.path} holds no {name}; it has {', '.join(self.manifest.files)}")
        return read_verified(self.path, self.manifest, name, _TEXT_LIMIT)

    def record(self, name: str) -> TensorRecord:
        """Shape, dtype and chunks of a tensor; raises BadInput, naming the nearest, when there is none of this name."""
        if name not in self.tensors:
            hint = nearest(name, self.tensors)
            raise BadInput(f"{self.path} holds no tensor {name}" + (f"; nearest: {hint}" if hint else ""))
        return self.tensors[name]

    def _fill(self, record: TensorRecord, chunk: Chunk, offsets: tuple[int, ...], box: Tensor) -> None:
        if not box.numel():
            return
        entry = entry_of(self._header(chunk.file), chunk.key, record.dtype, chunk.sizes, self.path / chunk.file)
        destination = Destination(entry, offsets, box)
        for index in range(destination.start // BLOCK_BYTES, -(-destination.end // BLOCK_BYTES)):
            destination.fill(self._block(chunk.file, index), index * BLOCK_BYTES)

    def _header(self, file: str) -> dict[str, Entry]:
        if file not in self._entries:
            size = self.manifest.files[file].bytes
            length = int.from_bytes(self._block(file, 0)[:8].numpy().tobytes(), "little") if size else 0
            blocks = range(-(-min(8 + length, size) // BLOCK_BYTES))
            head = b"".join(self._block(file, index).numpy().tobytes() for index in blocks)[: 8 + length]
            self._entries[file] = parse_header(head, size, self.path / file)
        return self._entries[file]

    def _block(self, file: str, index: int) -> Tensor:
        """A verified block, from memory if it is among the last used."""
        if (file, index) not in self._blocks:
            if len(self._blocks) >= CACHED_BLOCKS:
                self._blocks.popitem(last=False)
            block = torch.empty(self._files.block_bytes(file, index), dtype=torch.uint8)
            self._files.read(file, index, block.numpy().data)
            self._blocks[file, index] = block
        self._blocks.move_to_end((file, index))
        return self._blocks[file, index]
