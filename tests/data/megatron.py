"""Megatron's `.bin`/`.idx` read and written with `struct` alone: an oracle for data/indexed.py."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def read(stem: Path) -> list[list[list[int]]]:
    """Documents, each a list of sequences, each a list of token ids."""
    index, data = Path(f"{stem}.idx").read_bytes(), Path(f"{stem}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, n, d = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    lengths = struct.unpack_from(f"<{n}i", index, 34)
    pointers = struct.unpack_from(f"<{n}q", index, 34 + 4 * n)
    documents = struct.unpack_from(f"<{d}q", index, 34 + 12 * n)
    assert len(index) == 34 + 12 * n + 8 * d
    sequences = [
        list(struct.unpack_from(f"<{c}{CODES[code]}", data, p)) for c, p in zip(lengths, pointers, strict=True)
    ]
    assert sum(lengths) * struct.calcsize(CODES[code]) == len(data)
    return [sequences[a:b] for a, b in itertools.pairwise(documents)]


def write(stem: Path, documents: list[list[list[int]]], code: int) -> None:
    """The inverse of `read`."""
    sequences = [sequence for document in documents for sequence in document]
    width, pointers, starts = struct.calcsize(CODES[code]), [0], [0]
    for sequence in sequences:
        pointers.append(pointers[-1] + len(sequence) * width)
    for document in documents:
        starts.append(starts[-1] + len(document))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(starts))
    lengths = struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    body = struct.pack(f"<{len(sequences)}q", *pointers[:-1]) + struct.pack(f"<{len(starts)}q", *starts)
    Path(f"{stem}.idx").write_bytes(head + lengths + body)
    Path(f"{stem}.bin").write_bytes(b"".join(struct.pack(f"<{len(s)}{CODES[code]}", *s) for s in sequences))
