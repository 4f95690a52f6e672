"""The tokens of a group in a file of the cache, and the cache.

    <name>.tokens    token ids, then for each document its number of tokens and its place in the group, a description in JSON, the
                     length of the description (8 bytes, little endian), and the mark

The name is a digest of the file's name, size and tag, the number of the group, the key of the text, the tokenizer and what begins and ends
a text, so that a file is right for every run of the same text and tokenizer. Its description has a digest of what stands before it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from meshwright.data.encode import EncodedDocument
from meshwright.data.streams.stores import StoredFile
from meshwright.data.tokenizer import LoadedTokenizer
from meshwright.durable.writes import PARTIAL, digest, rename
from meshwright.spec.errors import OutOfResources
from meshwright.spec.fields import from_checked_plain

MARK = b"mwgroup1"
FORMAT = 1
SUFFIX = ".tokens"
LOCKS = 64
"""Lock files of a cache; groups share them by name."""
READ_BYTES = 1 << 22
VERIFIED = 4096
"""Verified groups that a process remembers."""
NAMED = 3
"""Unusable documents of a group that are named."""
ABANDONED_SECONDS = 3600.0
"""Seconds without a write after which a partial file is of no process."""
LOW_WATER = 0.9
"""Share of its bound to which a full cache is emptied."""


@dataclass(frozen=True)
class GroupRecord:
    """The description of a group: counts, the tokens' type, bytes of text, unusable documents and the first of them, and the digest."""

    documents: int
    tokens: int
    dtype: str
    text_bytes: int
    bad: int
    first_bad: tuple[str, ...]
    digest: str


class Cache:
    """A folder of group files with a bound on their bytes. Any number of processes of a host share it."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self._written = most_bytes
        """Bytes written since the last look at the bound; the first write looks."""

    def path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}{SUFFIX}"

    @contextmanager
    def making(self, name: str) -> Iterator[None]:
        """Hold the lock of a group: of several processes that need it one makes it, and the others wait."""
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"lock-{int(name[:8], 16) % LOCKS}", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def make_room(self, size: int) -> None:
        """Count `size` written bytes, and remove the files that were read least lately where the cache is beyond its bound."""
        self._written += size
        if self._written < self.most_bytes // 50:
            return
        self._written = 0
        for path in self.folder.glob(f"*/*{PARTIAL}"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:  # of a process that was killed
                    path.unlink()
        files = []
        for path in self.folder.glob(f"*/*{SUFFIX}"):
            with suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self.most_bytes:
            return
        for _, size, path in sorted(files):
            if total <= self.most_bytes * LOW_WATER:
                return
            path.unlink(missing_ok=True)
            total -= size


def texts_digest(tokenizer: LoadedTokenizer) -> str:
    """Digest of what tokens of a text follow from: the tokenizer, and the tokens that begin and end a text."""
    named = [
        tokenizer.record.digest,
        tokenizer.record.eos,
        list(tokenizer.text.begin_ids) if tokenizer.text.begin else [],
    ]
    return digest(json.dumps(named).encode())


def group_name(file: StoredFile, number: int, text: str, texts: str) -> str:
    """The name of group `number` of a file, of the text under the key `text`; `texts` is the digest of `texts_digest`."""
    named = [FORMAT, file.name, file.size, file.tag, number, text, texts]
    return digest(json.dumps(named).encode("utf-8", "surrogateescape"))


def write_group(path: Path, documents: Iterable[EncodedDocument], dtype: str, bad: list[str]) -> GroupRecord:
    """Write a group. `bad` is filled while `documents` are drawn. Raises OutOfResources where the disk is full."""
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    lengths = []
    places = []
    text_bytes = 0
    state = xxhash.xxh3_128()
    try:
        with partial.open("wb") as file:
            for document in documents:
                content = document.tokens.tobytes()
                state.update(content)
                file.write(content)
                lengths.append(len(document.tokens))
                places.append(int(document.document.key.rpartition("\0")[2]))
                text_bytes += document.text_bytes
            for values, kind in ((lengths, np.int32), (places, np.int64)):
                content = np.array(values, dtype=kind).tobytes()
                state.update(content)
                file.write(content)
            record = GroupRecord(
                len(lengths), sum(lengths), dtype, text_bytes, len(bad), tuple(bad[:NAMED]), state.hexdigest()
            )
            description = json.dumps(asdict(record)).encode()
            file.write(description + len(description).to_bytes(8, "little") + MARK)
        rename(partial, path)
    except OSError as error:
        raise OutOfResources(f"{path.parent}: cannot be written: {error.strerror or error}; see data.cache") from error
    finally:
        partial.unlink(missing_ok=True)
    return record


def read_record(path: Path) -> GroupRecord | None:
    """The description of a group whose bytes are those that were written; None if there is none, or a damaged one."""
    try:
        with path.open("rb") as file:
            record, before = _description(file.fileno())
            state = xxhash.xxh3_128()
            while before and (piece := file.read(min(READ_BYTES, before))):
                state.update(piece)
                before -= len(piece)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if not before and state.hexdigest() == record.digest else None


class VerifiedGroups:
    """The groups that this process has verified: each file once, as lanes ask for parts of a group one after another."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, tuple[int, int, GroupRecord]] = OrderedDict()

    def read(self, path: Path) -> GroupRecord | None:
        """`read_record`, of a file that was verified before without reading it."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        known = self._known.get(path)
        if known is not None and known[:2] == (status.st_ino, status.st_size):
            self._known.move_to_end(path)
            return known[2]
        record = read_record(path)
        if record is not None:
            self._known[path] = (status.st_ino, status.st_size, record)
            while len(self._known) > VERIFIED:
                self._known.popitem(last=False)
        return record


def _description(descriptor: int) -> tuple[GroupRecord, int]:
    """The description of an open group, and the bytes before it. Raises ValueError for what is none."""
    size = os.fstat(descriptor).st_size
    end = os.pread(descriptor, 8 + len(MARK), max(size - 8 - len(MARK), 0))
    length = int.from_bytes(end[:8], "little")
    before = size - len(end) - length
    if end[8:] != MARK or before < 0:
        raise ValueError("no group")
    return from_checked_plain(GroupRecord, json.loads(os.pread(descriptor, length, before))), before


class GroupFile:
    """An open group. Raises FileNotFoundError."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        with suppress(OSError):  # another user's
            os.utime(path)
        self.record, _ = _description(self._descriptor)
        self._dtype = np.dtype(self.record.dtype)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @cached_property
    def bounds(self) -> np.ndarray:
        """Token at which each document begins, and the end of the last: `(documents + 1,)` int64."""
        start = self.record.tokens * self._dtype.itemsize
        lengths = self._array(start, self.record.documents, np.dtype(np.int32))
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), int64."""
        return self._array(start * self._dtype.itemsize, stop - start, self._dtype).astype(np.int64)

    def place(self, document: int) -> int:
        """The place of a document in its file: its row in the row group, or the byte at which its line begins."""
        start = self.record.tokens * self._dtype.itemsize + self.record.documents * 4
        return int(self._array(start + 8 * document, 1, np.dtype(np.int64))[0])

    def _array(self, start: int, count: int, dtype: np.dtype) -> np.ndarray:
        content = os.pread(self._descriptor, count * dtype.itemsize, start)
        return np.frombuffer(content, dtype=dtype, count=count)
