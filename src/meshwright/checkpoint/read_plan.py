"""Which rank reads which block of a checkpoint, and which ranks it passes the block on to. Torch-free.

Every rank knows the byte ranges that all ranks need and computes the same plan: a block is read once, by one of the ranks that need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from meshwright.checkpoint.files import BLOCK_BYTES

FILES_AT_ONCE = 8
"""Files that a rank reads in parallel, each from its first block on."""

Ranges = Mapping[str, Sequence[tuple[int, int]]]
"""File name → byte ranges [start, end)."""


@dataclass(frozen=True)
class BlockTransfer:
    """Block `index` of `file`: the rank that reads it, and the ranks that get it from there."""

    file: str
    index: int
    reader: int
    receivers: tuple[int, ...]


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes as whole blocks, in order: ranges that share or border on a block become one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        first, last = start // BLOCK_BYTES * BLOCK_BYTES, -(-end // BLOCK_BYTES) * BLOCK_BYTES
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def header_readers(files_of_ranks: Sequence[Sequence[str]]) -> dict[str, int]:
    """The rank that reads the header of each file: one of those that need the file, in turn."""
    ranks: dict[str, list[int]] = {}
    for rank, files in enumerate(files_of_ranks):
        for file in files:
            ranks.setdefault(file, []).append(rank)
    return {file: needing[number % len(needing)] for number, (file, needing) in enumerate(sorted(ranks.items()))}


def plan_transfers(
    needs: Sequence[Ranges], headers: Mapping[str, tuple[int, int]], owners: Mapping[str, int] | None = None
) -> list[BlockTransfer]:
    """All block transfers of a load, in the order in which every rank works through them.

    `needs` are the byte ranges of each rank. `headers` gives for each file the rank that has read its header and the header's bytes;
    that rank reads the blocks of the header. Among the ranks that need the same consecutive blocks, each reads an equal run.
    With `owners`, the owner of a file reads all blocks of it.
    """
    transfers: list[BlockTransfer] = []
    for number, (file, (header_reader, header_bytes)) in enumerate(sorted(headers.items())):
        header_blocks = -(-header_bytes // BLOCK_BYTES)
        ranks_of: dict[int, list[int]] = {index: [header_reader] for index in range(header_blocks)}
        for rank, ranges in enumerate(needs):
            for start, end in ranges.get(file, ()):
                for index in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                    ranks = ranks_of.setdefault(index, [])
                    if rank not in ranks[-1:] and not (index < header_blocks and rank == header_reader):
                        ranks.append(rank)
        for (_, ranks), group in groupby(sorted(ranks_of), key=lambda index: (index < header_blocks, ranks_of[index])):
            run = list(group)
            for position, index in enumerate(run):
                turn = (position * len(ranks) // len(run) + number) % len(ranks)
                reader = header_reader if index < header_blocks else ranks[turn]
                reader = reader if owners is None else owners[file]
                transfers.append(BlockTransfer(file, index, reader, tuple(rank for rank in ranks if rank != reader)))
    return _in_order(transfers)


def _in_order(transfers: Sequence[BlockTransfer]) -> list[BlockTransfer]:
    """Readers take turns, and each reads a few files at a time from front to back.

    Every rank reads and receives in this one order, so the first transfer that is not complete can always proceed.
    """
    queues: dict[int, dict[str, list[BlockTransfer]]] = {}
    for transfer in transfers:
        queues.setdefault(transfer.reader, {}).setdefault(transfer.file, []).append(transfer)
    placed: list[tuple[int, int, BlockTransfer]] = []
    for reader, files in queues.items():
        keyed = [
            ((number // FILES_AT_ONCE, position, number), transfer)
            for number, queue in enumerate(files.values())
            for position, transfer in enumerate(queue)
        ]
        keyed.sort(key=lambda pair: pair[0])
        placed += [(turn, reader, transfer) for turn, (_, transfer) in enumerate(keyed)]
    placed.sort(key=lambda each: each[:2])
    return [transfer for _, _, transfer in placed]
