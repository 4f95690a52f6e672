"""Plans which rank reads each block of a checkpoint, and to which ranks it sends the block.

A block is a consecutive part of a file (16 MiB, `files.BLOCK_BYTES`) with its own digest. Every rank knows the byte ranges
that all ranks need, and so all ranks compute the same plan. Each block is read once, by one of the ranks that need it.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from meshwright.checkpoint.format.files import BLOCK_BYTES

PARALLEL_FILES = 8
"""Number of files that a rank reads at the same time, each from its first block on."""

Ranges = Mapping[str, Sequence[tuple[int, int]]]
"""The byte ranges [start, end) of each file, by the file's name."""


@dataclass(frozen=True)
class BlockTransfer:
    """The transfer of block number `index` of `file`: `reader` is the rank that reads it and sends it to `receivers`."""

    file: str
    index: int
    reader: int
    receivers: tuple[int, ...]


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extend byte ranges [start, end) of a file to whole blocks, merge those that overlap or touch, and sort them."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        first = start // BLOCK_BYTES * BLOCK_BYTES
        last = -(-end // BLOCK_BYTES) * BLOCK_BYTES
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def assign_header_readers(files_of_ranks: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the rank that reads the header of each file, by the file's name.

    `files_of_ranks` has the files that each rank needs. The ranks that need a file take turns from file to file.
    """
    ranks_of_file: dict[str, list[int]] = {}
    for rank, files in enumerate(files_of_ranks):
        for file in files:
            ranks_of_file.setdefault(file, []).append(rank)
    return {file: ranks[number % len(ranks)] for number, (file, ranks) in enumerate(sorted(ranks_of_file.items()))}


def plan_transfers(
    ranges_of_ranks: Sequence[Ranges],
    headers: Mapping[str, tuple[int, int]],
    owners: Mapping[str, int] | None = None,
) -> list[BlockTransfer]:
    """Return all transfers of a load, in the order in which every rank works through them.

    `ranges_of_ranks`: the byte ranges that each rank needs.
    `headers`: for each file the rank that has read its header, and the header's size in bytes. This rank also reads the
        header's blocks.
    `owners`: the only rank that can read each file; None: every rank can.

    If several ranks need the same consecutive blocks, each of them reads an equal share, of consecutive blocks.
    """
    transfers: list[BlockTransfer] = []
    for number, (file, (header_reader, header_bytes)) in enumerate(sorted(headers.items())):
        header_blocks = -(-header_bytes // BLOCK_BYTES)
        ranks_of_block: dict[int, list[int]] = {index: [header_reader] for index in range(header_blocks)}
        for rank, ranges in enumerate(ranges_of_ranks):
            for start, end in ranges.get(file, ()):
                for index in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                    ranks = ranks_of_block.setdefault(index, [])
                    if rank not in ranks[-1:] and not (index < header_blocks and rank == header_reader):
                        ranks.append(rank)
        # Groups of consecutive blocks that the same ranks need. Header blocks are groups of their own.
        by_ranks = groupby(sorted(ranks_of_block), key=lambda index: (index < header_blocks, ranks_of_block[index]))
        for (_, ranks), group in by_ranks:
            indices = list(group)
            for position, index in enumerate(indices):
                # `number` rotates the shares from file to file, so that different ranks read the first blocks of files.
                # Example: 2 ranks need 4 blocks. Blocks 0 and 1 are share 0, blocks 2 and 3 share 1.
                share = (position * len(ranks) // len(indices) + number) % len(ranks)
                reader = header_reader if index < header_blocks else ranks[share]
                reader = reader if owners is None else owners[file]
                transfers.append(BlockTransfer(file, index, reader, tuple(rank for rank in ranks if rank != reader)))
    return _interleave_readers(transfers)


def _interleave_readers(transfers: Sequence[BlockTransfer]) -> list[BlockTransfer]:
    """Order transfers so that readers alternate, and each reads `PARALLEL_FILES` files at a time from front to back.

    Every rank reads and receives in this order, so that the first incomplete transfer can always proceed.
    """
    transfers_of_reader: dict[int, dict[str, list[BlockTransfer]]] = {}
    for transfer in transfers:
        transfers_of_reader.setdefault(transfer.reader, {}).setdefault(transfer.file, []).append(transfer)
    ordered: list[tuple[int, int, BlockTransfer]] = []
    for reader, files in transfers_of_reader.items():
        keyed = [
            # Order: by set of PARALLEL_FILES files, then by position of the block within its file, then by file.
            ((number // PARALLEL_FILES, position, number), transfer)
            for number, file_transfers in enumerate(files.values())
            for position, transfer in enumerate(file_transfers)
        ]
        keyed.sort(key=lambda pair: pair[0])
        ordered += [(turn, reader, transfer) for turn, (_, transfer) in enumerate(keyed)]
    ordered.sort(key=lambda entry: entry[:2])
    return [transfer for _, _, transfer in ordered]
