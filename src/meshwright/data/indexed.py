"""Megatron's file pair `.bin` and `.idx`. `.bin` has all tokens, one after another; `.idx` says where sequences and documents begin.

The layout of `.idx`, little-endian, for n sequences and d document entries:

    9 bytes      magic
    uint64       version (1)
    uint8        code of the token type
    uint64       n
    uint64       d
    n × int32    length of each sequence
    n × int64    position of each sequence in `.bin`, in bytes
    d × int64    number of the sequence at which each document begins; the first entry is 0, the last is n

Multimodal files have n more bytes (int8 modes), which are not read here. Source: NVIDIA/Megatron-LM,
megatron/core/datasets/indexed_dataset.py (the format, not the code).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from meshwright.data.checked import CheckedFile, Entries
from meshwright.durable.writes import PARTIAL, publish, sync_open_file
from meshwright.spec.errors import BadInput, Damaged

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
LONGEST_DOCUMENT = 2**31 - 1
SPANS_AT_ONCE = 16


class DocumentSpan(NamedTuple):
    """The number of a document in its file, and a range [start, stop) of the file's tokens that belong to the document."""

    document: int
    start: int
    stop: int


class IndexedFile:
    """An open `.bin`/`.idx` pair. Opening reads only a few pages, whatever the size of the files.

    `stem` is the path without suffix. Raises BadInput if a file is missing, and Damaged if header and sizes do not match. Gaps between
    sequences are only detected by `check_layout`, which reads the whole index. A read raises Damaged if a file was truncated.
    """

    def __init__(self, stem: Path) -> None:
        self.stem = stem
        self.bin_path = bin_path(stem)
        self.idx_path = idx_path(stem)
        for path in (self.bin_path, self.idx_path):
            if not path.is_file():
                raise BadInput(f"{path}: no such file; a .bin and its .idx must lie side by side")
        self._bin = CheckedFile(self.bin_path)
        self._idx = CheckedFile(self.idx_path)
        self.dtype, self.sequences, entries = self._read_header()
        self._lengths, self._pointers, self._document_starts = self._open_index(entries)
        self.documents = entries - 1
        self.tokens = self._check_end()
        self._tokens = Entries(self._bin, self.dtype, 0, self.tokens)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the file, in the file's own type, read-only."""
        return self._tokens.read(start, stop)

    def check_sizes(self) -> None:
        """Raise Damaged if the size of a file has changed since it was opened."""
        self._bin.check_size()
        self._idx.check_size()

    def digests(self) -> Iterator[tuple[str, Path, str]]:
        """Read both files completely. Yields (key in the manifest, path, xxh3_128) for each."""
        yield "idx", self.idx_path, self._idx.digest()
        yield "bin", self.bin_path, self._bin.digest()

    def document_spans(self, start: int, stop: int) -> list[DocumentSpan]:
        """The documents with tokens in [start, stop), in order. Empty documents are skipped. Raises Damaged if they leave a gap."""
        spans: list[DocumentSpan] = []
        document = self._document_at(start)
        end = start
        while document < self.documents and end < stop:
            for span in self._spans(document, min(document + SPANS_AT_ONCE, self.documents)):
                if span.stop <= span.start or span.start >= stop:
                    continue
                if span.start > end or (spans and span.start < end):
                    break
                spans.append(span)
                end = span.stop
            document += SPANS_AT_ONCE
        if end < stop:
            raise Damaged(f"{self.idx_path}: no documents for tokens {end} to {stop}; put the file back")
        return spans

    def document_bounds(self) -> np.ndarray:
        """The start of each document in tokens, and the end of the last one, `(documents + 1,)` int64. Reads the whole index."""
        return self._bounds(0, self.documents)

    def token_offset(self, token: int) -> int:
        """The position of a token in `.bin`, in bytes."""
        return token * self.dtype.itemsize

    def check_layout(self) -> None:
        """Read the whole index. Raises Damaged if there are gaps between sequences, or if documents are not in ascending order."""
        pointers = self._pointers.read(0, self.sequences)
        ends = np.cumsum(self._lengths.read(0, self.sequences), dtype=np.int64) * self.dtype.itemsize
        expected = np.concatenate([[0], ends])[: self.sequences]
        wrong = np.flatnonzero(pointers != expected)
        if len(wrong):
            at = int(wrong[0])
            offset = HEADER.size + 4 * self.sequences + 8 * at
            difference = f"sequence {at} to start at byte {expected[at]} of the .bin, found {pointers[at]}"
            raise Damaged(f"{self.idx_path}: offset {offset}: expected {difference}")
        if np.any(np.diff(self._document_starts.read(0, len(self._document_starts))) < 0):
            raise Damaged(f"{self.idx_path}: document starts do not ascend")

    def _spans(self, first: int, last: int) -> list[DocumentSpan]:
        """The spans of the documents [first, last)."""
        ends = self._bounds(first, last).tolist()
        return [DocumentSpan(first + number, *ends[number : number + 2]) for number in range(last - first)]

    def _bounds(self, first: int, last: int) -> np.ndarray:
        """Starts of the documents [first, last) in tokens, and the end of the last one, int64. Raises Damaged if they do not ascend."""
        sequences = self._document_starts.read(first, last + 1)
        if sequences[0] < 0 or sequences[-1] > self.sequences or np.any(np.diff(sequences) < 0):
            raise Damaged(f"{self.idx_path}: document starts {first} to {last} do not ascend; put the file back")
        pointers = self._pointers.read(int(sequences[0]), min(int(sequences[-1]) + 1, self.sequences))
        ends = np.append(pointers // self.dtype.itemsize, self.tokens)[sequences - sequences[0]]
        if ends[0] < 0 or ends[-1] > self.tokens or np.any(np.diff(ends) < 0):
            raise Damaged(f"{self.idx_path}: documents {first} to {last} do not ascend; put the file back")
        return ends.astype(np.int64)

    def _document_at(self, token: int) -> int:
        sequence = bisect_right(self._pointers, token * self.dtype.itemsize) - 1
        return max(bisect_right(self._document_starts, sequence) - 1, 0)

    def _read_header(self) -> tuple[np.dtype[Any], int, int]:
        if self._idx.size < HEADER.size:
            raise Damaged(f"{self.idx_path}: expected a header of {HEADER.size} bytes, the file has {self._idx.size}")
        magic, version, code, sequences, entries = HEADER.unpack(self._idx.read(0, HEADER.size))
        if magic != MAGIC:
            raise Damaged(f"{self.idx_path}: offset 0: expected {MAGIC!r}, found {magic!r}")
        if version != VERSION:
            raise Damaged(f"{self.idx_path}: offset 9: expected version {VERSION}, found {version}")
        if code in FLOATS:
            raise BadInput(f"{self.idx_path}: offset 17: holds {FLOATS[code]} values, expected integer token ids")
        if code not in DTYPES:
            raise Damaged(f"{self.idx_path}: offset 17: expected a dtype code of {sorted(DTYPES)}, found {code}")
        if entries < 1:
            raise Damaged(f"{self.idx_path}: offset 26: expected at least 1 document entry, found {entries}")
        return np.dtype(DTYPES[code]), sequences, entries

    def _open_index(self, entries: int) -> tuple[Entries, Entries, Entries]:
        lengths_at = HEADER.size
        pointers_at = lengths_at + 4 * self.sequences
        documents_at = pointers_at + 8 * self.sequences
        size = documents_at + 8 * entries
        actual = self._idx.size
        if actual not in (size, size + self.sequences):
            counts = f"{self.sequences} sequences and {entries} document entries"
            raise Damaged(f"{self.idx_path}: expected {size} bytes for {counts}, found {actual}")
        lengths = Entries(self._idx, np.dtype("<i4"), lengths_at, self.sequences)
        pointers = Entries(self._idx, np.dtype("<i8"), pointers_at, self.sequences)
        documents = Entries(self._idx, np.dtype("<i8"), documents_at, entries)
        for at, expected, offset in ((0, 0, documents_at), (-1, self.sequences, documents_at + 8 * (entries - 1))):
            if documents[at] != expected:
                difference = (
                    f"document entry {'0' if at == 0 else entries - 1} to be sequence {expected}, found {documents[at]}"
                )
                raise Damaged(f"{self.idx_path}: offset {offset}: expected {difference}")
        return lengths, pointers, documents

    def _check_end(self) -> int:
        """The number of tokens. Raises Damaged if the last sequence does not end at the end of `.bin`."""
        expected = 0
        if self.sequences:
            expected = self._pointers[-1] + self._lengths[-1] * self.dtype.itemsize
        actual = self._bin.size
        if actual != expected:
            raise Damaged(f"{self.bin_path}: expected {expected} bytes (by its .idx), found {actual}")
        return actual // self.dtype.itemsize


class IndexedWriter:
    """Writes a `.bin`/`.idx` pair with one sequence for each document. The files get their final names in `finish`.

    After `finish`, `digests` has the xxh3_128 of both files under "bin" and "idx".
    """

    def __init__(self, stem: Path, dtype: str) -> None:
        self.stem = stem
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.lengths: list[int] = []
        self.tokens = 0
        self.digests: dict[str, str] = {}
        self._state = xxhash.xxh3_128()
        self._bin: BinaryIO = _partial(bin_path(stem)).open("wb")

    def add_document(self, tokens: np.ndarray) -> None:
        """Append a document. Raises BadInput if it is too long for the format."""
        if len(tokens) > LONGEST_DOCUMENT:
            raise BadInput(f"{self.stem}: a document of {len(tokens)} tokens; .idx can hold at most {LONGEST_DOCUMENT}")
        content = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
        self._bin.write(content)
        self._state.update(content)
        self.lengths.append(len(tokens))
        self.tokens += len(tokens)

    def finish(self) -> None:
        """Make both files durable and give them their names, `.idx` last. So if an `.idx` exists, the pair is complete."""
        _sync_and_close(self._bin)
        index = self._index()
        with _partial(idx_path(self.stem)).open("wb") as file:
            file.write(index)
            _sync_and_close(file)
        self.digests = {"bin": self._state.hexdigest(), "idx": xxhash.xxh3_128_hexdigest(index)}
        for path in (bin_path(self.stem), idx_path(self.stem)):
            publish(_partial(path), path)

    def abandon(self) -> None:
        """Close without giving the files their names. A later attempt overwrites the partial files."""
        self._bin.close()

    def _index(self) -> bytes:
        lengths = np.asarray(self.lengths, dtype="<i4")
        code = next(code for code, name in DTYPES.items() if np.dtype(name) == self.dtype)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        pointers = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)].astype("<i8")
        documents = np.arange(len(lengths) + 1, dtype="<i8")
        head = HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents))
        return b"".join([head, lengths.tobytes(), pointers.tobytes(), documents.tobytes()])


def bin_path(stem: Path) -> Path:
    return stem.with_name(stem.name + ".bin")


def idx_path(stem: Path) -> Path:
    return stem.with_name(stem.name + ".idx")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    sync_open_file(file.fileno(), Path(file.name))
    file.close()
