"""Reads whole tensors or rows of a checkpoint in one process, without a process group: for export, evaluation and init.

A block is a consecutive part of a file (16 MiB, `files.BLOCK_BYTES`) with its own digest. A chunk is a box (rectangular
part) of a tensor, stored as one entry of a safetensors file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.format.contents import TensorChunk, TensorRecord, read_contents
from meshwright.checkpoint.format.files import BLOCK_BYTES, plain_name
from meshwright.checkpoint.format.header import TensorEntry, find_entry, parse_header
from meshwright.checkpoint.format.manifest import STATE, DamagedCheckpoint, read_own_manifest
from meshwright.checkpoint.format.plain_files import decode_state
from meshwright.checkpoint.format.verify import FileBlock, check_blocks, check_sizes, read_verified, run_id_of
from meshwright.checkpoint.local_tensors import DTYPES
from meshwright.checkpoint.read.block_reader import BlockFiles
from meshwright.checkpoint.read.fill import Destination
from meshwright.spec.errors import BadInput, Damaged, nearest

_TEXT_LIMIT = 256 << 20
"""Largest text or `state.json` that is read, in bytes."""
CACHED_BLOCKS = 4
"""Number of blocks that an open reader keeps in memory."""


class CheckpointReader:
    """A committed checkpoint opened for reading. Use it as a context manager, or `close` it.

    It reads and verifies only the blocks that contain the requested rows. The last `CACHED_BLOCKS` blocks stay in memory,
    so that reading rows in order reads each block once. Not thread-safe.

    Raises Damaged if a file differs from what was written, or if the checkpoint belongs to another run than its folder.
    Raises BadInput if `path` is not a folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_own_manifest(path, run_id_of(path))
        damage = check_sizes(path, self.manifest)
        if damage:
            raise DamagedCheckpoint(path, damage)
        self._files = BlockFiles(path, self.manifest)
        self._entries: dict[str, dict[str, TensorEntry]] = {}
        self._blocks: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        self.tensors = read_contents(path, self.manifest)

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
        """Yield the names of the tensors that begin with `prefix`."""
        return (name for name in self.tensors if name.startswith(prefix))

    def read(self, name: str) -> Tensor:
        """Return the whole tensor, on the CPU, in its stored dtype."""
        record = self.record(name)
        if record.shape:
            return self.read_rows(name, 0, record.shape[0])
        target = torch.empty((), dtype=DTYPES[record.dtype])
        for chunk in record.chunks:
            self._fill(record, chunk, (), target)
        return target

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of dimension 0, on the CPU, in the stored dtype. Only their blocks are read."""
        record = self.record(name)
        if not record.shape or not 0 <= start <= stop <= record.shape[0]:
            raise BadInput(f"{self.path}: {name} has shape {record.shape}; rows {start} to {stop} are not in it")
        target = torch.empty((stop - start, *record.shape[1:]), dtype=DTYPES[record.dtype])
        for chunk in record.chunks:
            first = max(start, chunk.offsets[0])
            last = min(stop, chunk.offsets[0] + chunk.sizes[0])
            if first >= last:
                continue
            box = target[first - start : last - start]
            for dim in range(1, len(record.shape)):
                box = box.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
            self._fill(record, chunk, (first - chunk.offsets[0], *(0 for _ in chunk.sizes[1:])), box)
        return target

    def verify(self, names: Iterable[str]) -> None:
        """Compare all blocks that contain elements of these tensors with their digests, in several threads.

        Raises DamagedCheckpoint if a block differs.
        """
        blocks: dict[FileBlock, None] = {}
        for name in names:
            record = self.record(name)
            for chunk in record.chunks:
                entry = self._entry(record, chunk)
                indices = range(entry.start // BLOCK_BYTES, -(-entry.end // BLOCK_BYTES))
                blocks.update(dict.fromkeys(FileBlock(chunk.file, index) for index in indices))
        if damage := check_blocks(self.path, self.manifest, list(blocks)):
            raise DamagedCheckpoint(self.path, damage)

    def state(self) -> dict[str, Any]:
        """Return the contents of `state.json`: step, samples, tokens and other values."""
        return decode_state(self._read_file(STATE), self.path / STATE)

    def text(self, name: str) -> str:
        """Return the contents of a text file that was saved with the tensors, such as `config.yaml`."""
        try:
            return self._read_file(name).decode("utf-8")
        except UnicodeDecodeError as error:
            raise Damaged(f"{self.path / name} is not UTF-8: {error}") from error

    def _read_file(self, name: str) -> bytes:
        if plain_name(name) is None or name not in self.manifest.files:
            raise BadInput(f"{self.path} holds no {name}; it has {', '.join(self.manifest.files)}")
        return read_verified(self.path, self.manifest, name, _TEXT_LIMIT)

    def record(self, name: str) -> TensorRecord:
        """Return shape, dtype and chunks of a tensor. Raises BadInput with the nearest name if there is no such tensor."""
        if name not in self.tensors:
            hint = nearest(name, self.tensors)
            raise BadInput(f"{self.path} holds no tensor {name}" + (f"; nearest: {hint}" if hint else ""))
        return self.tensors[name]

    def _fill(self, record: TensorRecord, chunk: TensorChunk, offsets: tuple[int, ...], box: Tensor) -> None:
        if not box.numel():
            return
        destination = Destination(self._entry(record, chunk), offsets, box)
        for index in range(destination.start // BLOCK_BYTES, -(-destination.end // BLOCK_BYTES)):
            destination.fill(self._block(chunk.file, index), index * BLOCK_BYTES)

    def _entry(self, record: TensorRecord, chunk: TensorChunk) -> TensorEntry:
        return find_entry(self._header(chunk.file), chunk.key, record.dtype, chunk.sizes, self.path / chunk.file)

    def _header(self, file: str) -> dict[str, TensorEntry]:
        if file not in self._entries:
            size = self.manifest.files[file].bytes
            length = int.from_bytes(self._block(file, 0)[:8].numpy().tobytes(), "little") if size else 0
            blocks = range(-(-min(8 + length, size) // BLOCK_BYTES))
            header = b"".join(self._block(file, index).numpy().tobytes() for index in blocks)[: 8 + length]
            self._entries[file] = parse_header(header, size, self.path / file)
        return self._entries[file]

    def _block(self, file: str, index: int) -> Tensor:
        """Return a verified block (uint8), from memory if it was used recently."""
        if (file, index) not in self._blocks:
            if len(self._blocks) >= CACHED_BLOCKS:
                self._blocks.popitem(last=False)
            block = torch.empty(self._files.block_bytes(file, index), dtype=torch.uint8)
            self._files.read(file, index, block.numpy().data)
            self._blocks[file, index] = block
        self._blocks.move_to_end((file, index))
        return self._blocks[file, index]
