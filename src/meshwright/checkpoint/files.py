"""Files that survive: written once with digests taken on the way, made durable, and read back without trusting them.

Torch-free. `spec.failures` turns every operating-system error a user can meet into one of the project's own.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from meshwright.durable.writes import sync_open_file
from meshwright.spec.errors import Damaged

BLOCK_BYTES = 16 << 20
"""A file's digest is also kept per block of this size, so that damage is located and verified in parallel."""

Bytes = bytes | bytearray | memoryview

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UNREADABLE = {
    errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.ESTALE,  # the medium or its server failed
    errno.EACCES, errno.EPERM,  # another user's file
    errno.ENXIO, errno.ENODEV, errno.ENOTDIR, errno.EISDIR, errno.ELOOP,  # a socket, device, folder or link where a file should be
}  # fmt: skip


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its length, the xxh3_128 of all of it, and the xxh3_64 of each block, in hexadecimal."""

    bytes: int
    digest: str
    blocks: tuple[str, ...]


class FileWriter:
    """A new file, written front to back; `finish` makes it durable and returns its record.

    Leaving the `with` block without `finish` closes the file and promises nothing. Raises FileExistsError when `path`
    is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = 0
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_64()
        self._blocks: list[str] = []
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write(self, data: Bytes) -> None:
        """Digest and append."""
        self.digest(data)
        self.append(data)

    def digest(self, data: Bytes) -> None:
        """Take `data` into the digests; the same bytes must be appended, in the same order."""
        view = memoryview(data).cast("B")
        self._whole.update(view)
        while view:
            part = view[: BLOCK_BYTES - self._bytes % BLOCK_BYTES]
            self._block.update(part)
            self._bytes += len(part)
            if self._bytes % BLOCK_BYTES == 0:
                self._close_block()
            view = view[len(part) :]

    def append(self, data: Bytes) -> None:
        """Write all of `data`; a short write is continued. May run in another thread than `digest`."""
        assert self._descriptor is not None
        view = memoryview(data).cast("B")
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            error.filename = str(self.path)
            raise

    def finish(self) -> FileRecord:
        """Make the contents durable and close."""
        assert self._descriptor is not None
        sync_open_file(self._descriptor, self.path)
        os.close(self._descriptor)
        self._descriptor = None
        if self._bytes % BLOCK_BYTES:
            self._close_block()
        return FileRecord(self._bytes, self._whole.hexdigest(), tuple(self._blocks))

    def _close_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block.reset()


def write_file(path: Path, data: bytes) -> FileRecord:
    """A small file, durable."""
    with FileWriter(path) as out:
        out.write(data)
        return out.finish()


def open_regular(path: Path) -> int:
    """A descriptor of an existing regular file.

    A link, pipe or device raises Damaged: a checkpoint holds plain files only, so nothing outside its folder is ever
    read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged(f"{path} is a symbolic link; a checkpoint holds regular files only") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path} is not a regular file")
    return descriptor


def read_small(path: Path, limit: int) -> bytes:
    """All of a small file; more than `limit` bytes raise Damaged before anything is read."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise Damaged(f"{path} has {size} bytes; at most {limit} are expected")
        data = bytearray(size)
        read_range(descriptor, data, 0, path)
        return bytes(data)
    finally:
        os.close(descriptor)


def read_range(descriptor: int, target: Bytes, offset: int, path: Path) -> None:
    """Fill `target` from byte `offset` on; raises Damaged when the file ends too early."""
    view = memoryview(target).cast("B")
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise Damaged(f"{path} ends at byte {offset}; {len(view)} more were expected")
        view, offset = view[count:], offset + count


def parse_json(data: bytes, path: Path) -> Any:
    """JSON from a file nobody vouches for; raises Damaged naming where it stops making sense."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is not readable JSON: {error}") from error


def with_reserve(tensor_bytes: int) -> int:
    """Bytes to ask of a disk for a checkpoint of `tensor_bytes`: 1% and 1 MB more, for headers, metadata, manifest and texts."""
    return tensor_bytes + tensor_bytes // 100 + 10**6


def room_for(folder: Path, tensor_bytes: int) -> str | None:
    """Why a checkpoint of `tensor_bytes` does not fit on the disk of `folder`, or None when it does."""
    need, have = with_reserve(tensor_bytes), shutil.disk_usage(folder).free
    if need <= have:
        return None
    return (
        f"{folder}: a checkpoint needs {need:,} bytes and {have:,} are free; free some, lower checkpoint.keep, or "
        "place the run elsewhere with --runs"
    )


def plain_name(name: object) -> str | None:
    """`name` if it is a file name without separators, leading dots or odd characters, else None."""
    return name if isinstance(name, str) and _PLAIN_NAME.fullmatch(name) else None


def unreadable(error: OSError) -> bool:
    """Whether an error is the file's own, so that the checkpoint counts as damaged, and not a lack of memory or descriptors."""
    return error.errno in _UNREADABLE
