"""Fills the tensors of all ranks from one checkpoint. Each byte is read once, by one of the ranks that need it."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.format.contents import Contents, parse_contents
from meshwright.checkpoint.format.files import BLOCK_BYTES
from meshwright.checkpoint.format.header import TensorEntry, find_entry, parse_header, read_header_bytes
from meshwright.checkpoint.format.manifest import (
    COMMITTED,
    CONTENTS,
    MANIFEST,
    STATE,
    CheckpointManifest,
    DamagedCheckpoint,
    check_run,
    commit_line,
    parse_manifest,
    read_committed,
)
from meshwright.checkpoint.format.plain_files import decode_state
from meshwright.checkpoint.format.verify import check_sizes, read_verified
from meshwright.checkpoint.local_tensors import LocalTensor, device_of, local_boxes
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.read.block_reader import BlockFiles, BlockReader
from meshwright.checkpoint.read.fill import Destination, Store, copy_values, intersect
from meshwright.checkpoint.read.fit import check_complete, check_fit
from meshwright.checkpoint.read.read_plan import BlockTransfer, assign_header_readers, merge_ranges, plan_transfers
from meshwright.events.span import Recorder
from meshwright.spec.errors import BadInput, Damaged
from meshwright.state.parts import StateParts

PLAIN_LIMIT = 1 << 30
"""Largest JSON or text file that is read, in bytes."""


@dataclass(frozen=True)
class OpenCheckpoint:
    """The manifest, tensor records and state of a checkpoint. The first rank has read them; all ranks have equal ones."""

    path: Path
    manifest: CheckpointManifest
    contents: Contents
    state: dict[str, Any]


def open_checkpoint(ranks: RankGroup, path: Path, run_id: str | None, activity: str) -> OpenCheckpoint:
    """Read and verify all files but the tensors on the first rank, and send them to all ranks. Collective.

    `activity` names what the user does, for error messages. Raises Damaged if a file differs from what was written, or
    if the checkpoint belongs to another run than `run_id`. Raises BadInput if a rank sees another folder than the first
    rank.
    """
    plain = ranks.run_on_first(activity, lambda: _read_plain(path, run_id))

    def parse() -> OpenCheckpoint:
        if not ranks.is_first:
            _check_same_folder(path, plain[MANIFEST], ranks.rank)
        manifest = parse_manifest(path, plain[MANIFEST])
        contents = parse_contents(plain[CONTENTS], path / CONTENTS, manifest)
        return OpenCheckpoint(path, manifest, contents, decode_state(plain[STATE], path / STATE))

    opened: list[OpenCheckpoint] = []
    ranks.run_on_all(activity, lambda: opened.append(parse()))  # the result is not sent: it is the same on all ranks
    return opened[0]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection within a `with` block.

    A collection takes 0.15 s (measured on an H100 host), because torch has many objects, and no thread reads meanwhile.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_garbage_collection()
def load_tensors(
    ranks: RankGroup,
    opened: OpenCheckpoint,
    tensors: Mapping[str, LocalTensor],
    recorder: Recorder,
    *,
    prefix: str,
    convert: bool,
    activity: str,
    device_group: dist.ProcessGroup | None = None,
    files: BlockFiles | None = None,
    owners: Mapping[str, int] | None = None,
) -> None:
    """Fill `tensors` in place. Collective. Raises the errors of `CheckpointStore.load`.

    `prefix`: all stored tensors whose names begin with it must be requested by some rank.
    `convert`: whether a stored dtype may differ from the tensor's.
    `device_group`: sends blocks that several ranks need from device to device, if every rank has its tensors on devices.
    `files`: reads the blocks; None reads them from storage.
    `owners`: the only rank that can read each file; None: every rank can read every file.
    """
    contents = opened.contents
    requested = set().union(*ranks.run_on_all(activity, lambda: check_fit(contents, tensors, prefix, convert)))
    check_complete(contents, requested, prefix, activity)
    files = files or BlockFiles(opened.path, opened.manifest)
    try:
        parts: list[_ChunkPart] = []
        ranks.run_on_all(activity, lambda: parts.extend(_chunk_parts(contents, tensors)))
        entries, headers = _read_headers(ranks, files, sorted({part.file for part in parts}), activity, owners)
        destinations: dict[tuple[str, int], list[Destination]] = defaultdict(list)

        device = device_of(tensors)

        def assign() -> tuple[dict[str, list[tuple[int, int]]], str]:
            ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
            paths = {file: opened.path / file for file in entries}
            for part in parts:
                entry = find_entry(entries[part.file], part.key, part.dtype, part.shape, paths[part.file])
                destination = Destination(entry, part.offsets, part.target, part.store)
                ranges[part.file].append((destination.start, destination.end))
                for index in range(destination.start // BLOCK_BYTES, -(-destination.end // BLOCK_BYTES)):
                    destinations[part.file, index].append(destination)
            return {file: merge_ranges(needed) for file, needed in ranges.items()}, device.type

        assigned = ranks.run_on_all(activity, assign)
        transfers = plan_transfers([needs for needs, _ in assigned], headers, owners)

        def fill(file: str, index: int, block: Tensor) -> None:
            for destination in destinations.get((file, index), ()):
                destination.fill(block, index * BLOCK_BYTES)

        usable = device_group is not None and {_device_type(device_group)} == {
            device_type for _, device_type in assigned
        }
        reader = BlockReader(files, ranks, device, fill, device_group if usable else None)
        with recorder.span("read", lane="checkpoint"), torch.no_grad():
            _run(ranks, reader, transfers, activity)
    finally:
        files.close()


def _device_type(group: dist.ProcessGroup) -> str:
    """Return the type of the devices whose memory a process group sends."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


@dataclass(frozen=True)
class _ChunkPart:
    """A part of a stored chunk, and the local tensor `target` that it fills by `store`.

    `file`, `key`, `dtype` and `shape` describe the whole chunk: a box of a tensor, stored as one safetensors entry. The
    part begins at `offsets` within the chunk and has the shape of `target`.
    """

    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    target: Tensor
    store: Store


def _chunk_parts(contents: Contents, tensors: Mapping[str, LocalTensor]) -> Iterator[_ChunkPart]:
    """Yield the parts of stored chunks from which this rank's pieces of `tensors` are filled."""
    for name, tensor in tensors.items():
        record = contents[name]
        encoded = tensor.encoded if isinstance(tensor, StateParts) else None
        store = copy_values if encoded is None else encoded.write
        for offsets, elements in local_boxes(tensor):
            for chunk in record.chunks:
                # The usual case: the piece is a whole chunk, and neither has to be cut.
                if (chunk.offsets, chunk.sizes) == (offsets, elements.shape) and elements.numel():
                    yield _ChunkPart(
                        chunk.file, chunk.key, record.dtype, chunk.sizes, (0,) * len(chunk.sizes), elements, store
                    )
                    continue
                intersection = intersect(chunk, offsets, tuple(elements.shape))
                if intersection is not None:
                    chunk_offsets, box_offsets, sizes = intersection
                    target = elements
                    for dim, (offset, size) in enumerate(zip(box_offsets, sizes, strict=True)):
                        target = target.narrow(dim, offset, size)
                    yield _ChunkPart(chunk.file, chunk.key, record.dtype, chunk.sizes, chunk_offsets, target, store)


def _read_plain(path: Path, run_id: str | None) -> dict[str, bytes]:
    """Return the contents of manifest.json, metadata.json and state.json, by file name.

    Also checks the names and sizes of all files, and the contents of all files but tensors. Raises DamagedCheckpoint with
    all damage that is found.
    """
    data = read_committed(path)
    manifest = parse_manifest(path, data)
    check_run(path, manifest, run_id)
    damage = check_sizes(path, manifest)
    plain = {MANIFEST: data}
    for name in sorted(manifest.files.keys() - {entry.file for entry in damage}):
        if not name.endswith(".safetensors"):
            try:
                plain[name] = read_verified(path, manifest, name, PLAIN_LIMIT)
            except DamagedCheckpoint as error:
                damage += error.damage
    if damage:
        raise DamagedCheckpoint(path, damage)
    for name in (CONTENTS, STATE):
        if name not in plain:
            raise Damaged(f"{path} has no {name}")
    return {name: plain[name] for name in (MANIFEST, CONTENTS, STATE)}


def _check_same_folder(path: Path, manifest: bytes, rank: int) -> None:
    """Raise BadInput unless this rank sees the first rank's checkpoint. Its COMMITTED file (33 bytes) is compared."""
    try:
        same = (path / COMMITTED).read_bytes() == commit_line(manifest)
    except OSError:
        same = False
    if not same:
        raise BadInput(
            f"rank {rank} does not see the {path} that rank 0 sees; the run folder must be on storage that all hosts share"
        )


def _read_headers(
    ranks: RankGroup, files: BlockFiles, needed: list[str], activity: str, owners: Mapping[str, int] | None
) -> tuple[dict[str, dict[str, TensorEntry]], dict[str, tuple[int, int]]]:
    """Read the safetensors headers of the files that this rank needs (`needed`). One rank reads each header. Collective.

    Returns the entries by file and key, and for each file the rank that read its header and the header's size in bytes.
    A header is verified later, together with its block, before the load ends.
    """
    files_of_ranks = ranks.run_on_all(activity, lambda: needed)
    readers = assign_header_readers(files_of_ranks)
    if owners is not None:
        readers = {file: owners[file] for file in readers}
    # Files whose header other ranks need too. Only these headers are sent.
    shared = {
        file
        for file, reader in readers.items()
        if any(file in rank_files for rank, rank_files in enumerate(files_of_ranks) if rank != reader)
    }
    header_of: dict[str, bytes] = {}

    def read() -> dict[str, tuple[int, bytes | None]]:
        for file, reader in readers.items():
            if reader == ranks.rank:
                header_of[file] = files.read_header(file, read_header_bytes)
        return {file: (len(header), header if file in shared else None) for file, header in header_of.items()}

    headers: dict[str, tuple[int, int]] = {}
    for rank, headers_of_rank in enumerate(ranks.run_on_all(activity, read)):
        for file, (size, header) in headers_of_rank.items():
            headers[file] = (rank, size)
            if header is not None:
                header_of[file] = header

    def parse() -> dict[str, dict[str, TensorEntry]]:
        manifest = files.manifest
        return {file: parse_header(header_of[file], manifest.files[file].bytes, files.path / file) for file in needed}

    entries: list[dict[str, dict[str, TensorEntry]]] = []
    ranks.run_on_all(activity, lambda: entries.append(parse()))
    return entries[0], headers


def _run(ranks: RankGroup, reader: BlockReader, transfers: list[BlockTransfer], activity: str) -> None:
    """Carry out the transfers on all ranks. Then raise the failure of any rank on all of them."""
    ranks.run_communication(activity, lambda: reader.run(transfers))

    def report() -> None:
        if reader.failure is not None:
            raise reader.failure

    ranks.run_on_all(activity, report)
