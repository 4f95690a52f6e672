"""Stores the tokens of one group in a file of the cache, and limits the size of the cache.

A file is `<name>.tokens` and consists of:

    token ids                            of all documents, one after another
    documents × int32                    the number of tokens of each document
    documents × int64                    the place of each document in the input file
    JSON                                 a GroupRecord
    8 bytes, little endian               the length of the JSON
    8 bytes                              MARK

The name is a digest of everything that the tokens depend on: name, size and tag of the input file, number of the group,
key of the text, tokenizer, and the tokens that begin and end a text. So every run with the same settings can use the
file. The JSON has a digest of the bytes before it.
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
"""Last bytes of every group file."""
FORMAT = 1
"""Version of the file format. It is part of the name, so files of another version are not found."""
SUFFIX = ".tokens"
"""Ending of the names of group files."""
LOCKS = 64
"""Number of lock files of a cache. A group uses the lock file that its name selects; several groups share one."""
READ_BYTES = 1 << 22
"""Bytes that verification reads at once."""
VERIFIED = 4096
"""Groups that a process remembers as verified."""
NAMED = 3
"""Unusable documents of a group that are named in messages."""
ABANDONED_SECONDS = 3600.0
"""Seconds without a write after which a partial file is regarded as abandoned and deleted."""
LOW_WATER = 0.9
"""When a cache is full, files are deleted until its size is this fraction of its limit."""


@dataclass(frozen=True)
class GroupRecord:
    """What a group file says about itself."""

    documents: int
    """Number of usable documents."""
    tokens: int
    """Number of tokens of all documents."""
    dtype: str
    """Name of the NumPy type of the token ids."""
    text_bytes: int
    """Bytes of the documents' texts in UTF-8."""
    bad: int
    """Number of unusable documents, which are left out."""
    first_bad: tuple[str, ...]
    """Descriptions of the first unusable documents."""
    digest: str
    """xxh3_128 of all bytes before the JSON, in hexadecimal."""


class Cache:
    """A folder of group files with a limit on their total size, `most_bytes`. All processes of a host can share one."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self._written = most_bytes
        """Bytes written since the cache was last compared with its limit. The initial value makes the first write compare."""

    def path(self, name: str) -> Path:
        """Return the path of the file of the group `name`, which need not exist."""
        return self.folder / name[:2] / f"{name}{SUFFIX}"

    @contextmanager
    def making(self, name: str) -> Iterator[None]:
        """Hold the lock of the group `name`. If several processes need the group, one makes it while the others wait."""
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"lock-{int(name[:8], 16) % LOCKS}", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def make_room(self, size: int) -> None:
        """Note that `size` bytes were written. If the cache exceeds its limit, delete the files that were read least recently."""
        self._written += size
        if self._written < self.most_bytes // 50:
            return
        self._written = 0
        for path in self.folder.glob(f"*/*{PARTIAL}"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:  # Its process was killed.
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
    """Return a digest of the tokenizer and of the tokens that begin and end each text. The tokens of a text depend on nothing else."""
    named = [
        tokenizer.record.digest,
        tokenizer.record.eos,
        list(tokenizer.text.begin_ids) if tokenizer.text.begin else [],
    ]
    return digest(json.dumps(named).encode())


def group_name(file: StoredFile, number: int, text: str, texts: str) -> str:
    """Return the name of group `number` of a file in the cache. `text` is the key of the text, `texts` the result of `texts_digest`."""
    named = [FORMAT, file.name, file.size, file.tag, number, text, texts]
    return digest(json.dumps(named).encode("utf-8", "surrogateescape"))


def write_group(
    path: Path, documents: Iterable[EncodedDocument], dtype: str, bad: list[str]
) -> tuple[GroupRecord, int]:
    """Write the file of a group. Return its record, and its size in bytes.

    Another process that makes room in the cache may delete the file at any time.

    `documents` yields the group's usable documents with their tokens.

    The generator `documents` appends descriptions of unusable documents to `bad` while it runs. Raises OutOfResources
    if the file cannot be written, for example because the disk is full.
    """
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
            size = file.tell()
        rename(partial, path)
    except OSError as error:
        raise OutOfResources(f"{path.parent}: cannot be written: {error.strerror or error}; see data.cache") from error
    finally:
        partial.unlink(missing_ok=True)
    return record, size


def read_record(path: Path) -> GroupRecord | None:
    """Read a group file and verify its digest. Returns its record, or None if the file is missing or damaged."""
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
    """The group files that this process has verified. Several lanes ask for parts of one group, and its file is verified only once."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, tuple[int, int, GroupRecord]] = OrderedDict()

    def read(self, path: Path) -> GroupRecord | None:
        """Like `read_record`, but a file that was verified before is not read again."""
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
    """Return the record of an open group file, and the number of bytes before the record. Raises ValueError if it is no group file."""
    size = os.fstat(descriptor).st_size
    end = os.pread(descriptor, 8 + len(MARK), max(size - 8 - len(MARK), 0))
    length = int.from_bytes(end[:8], "little")
    before = size - len(end) - length
    if end[8:] != MARK or before < 0:
        raise ValueError("no group")
    return from_checked_plain(GroupRecord, json.loads(os.pread(descriptor, length, before))), before


class GroupFile:
    """An open group file, whose tokens are read on demand. Raises FileNotFoundError if there is no such file."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        with suppress(OSError):  # The file belongs to another user, so its time of last use cannot be set.
            os.utime(path)
        self.record, _ = _description(self._descriptor)
        self._dtype = np.dtype(self.record.dtype)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @cached_property
    def bounds(self) -> np.ndarray:
        """The number of the token at which each document begins, followed by the number of tokens: `(documents + 1,)` int64."""
        start = self.record.tokens * self._dtype.itemsize
        lengths = self._array(start, self.record.documents, np.dtype(np.int32))
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of the group, int64."""
        return self._array(start * self._dtype.itemsize, stop - start, self._dtype).astype(np.int64)

    def place(self, document: int) -> int:
        """Return where a document is in its input file.

        This is its row in the row group of parquet, or the offset in bytes at which its line begins.
        """
        start = self.record.tokens * self._dtype.itemsize + self.record.documents * 4
        return int(self._array(start + 8 * document, 1, np.dtype(np.int64))[0])

    def _array(self, start: int, count: int, dtype: np.dtype) -> np.ndarray:
        content = os.pread(self._descriptor, count * dtype.itemsize, start)
        return np.frombuffer(content, dtype=dtype, count=count)
