"""Records of a checkpoint's files, and reads that check type and size.

Errors of the operating system pass through; `spec.failures` converts them into the project's error classes.

This module does not import torch.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import Damaged

BLOCK_BYTES = 16 << 20
"""Size of a block of a file in bytes (16 MiB).

Each block has its own digest, so that threads and ranks can verify a file in parallel, and report where it is damaged.
"""

Bytes = bytes | bytearray | memoryview

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UNREADABLE = {
    # The disk or the file server has failed.
    errno.EIO,
    errno.ENODATA,
    errno.EBADMSG,
    errno.EUCLEAN,
    errno.ESTALE,
    # The file belongs to another user.
    errno.EACCES,
    errno.EPERM,
    # There is a socket, device, folder or link instead of a file.
    errno.ENXIO,
    errno.ENODEV,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
}


@dataclass(frozen=True)
class FileRecord:
    """The size of a file in bytes, and the xxh3_64 digest of each of its blocks in hexadecimal."""

    bytes: int
    blocks: tuple[str, ...]

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> FileRecord:
        """Return the record from the values of `asdict`. This program wrote them, so they are not checked."""
        return cls(values["bytes"], tuple(values["blocks"]))


def open_regular(path: Path) -> int:
    """Open an existing regular file for reading and return its descriptor.

    Raises Damaged for a symbolic link, pipe or device, so that no file outside the checkpoint's folder is read.
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
    """Return the contents of a small file. Raises Damaged before reading if it has more than `limit` bytes."""
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
    """Fill `target` with the file's bytes from `offset` on. Raises Damaged if the file ends too early."""
    view = memoryview(target).cast("B")
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise Damaged(f"{path} ends at byte {offset}; {len(view)} more were expected")
        view = view[count:]
        offset = offset + count


def add_reserve(tensor_bytes: int) -> int:
    """Return the disk space in bytes for a checkpoint whose tensors have `tensor_bytes`.

    Headers, JSON files and text files get 1% and 1 MB more.
    """
    return tensor_bytes + tensor_bytes // 100 + 10**6


def disk_space_error(folder: Path, tensor_bytes: int) -> str | None:
    """Return the error message if a checkpoint of `tensor_bytes` does not fit on the disk of `folder`, else None."""
    needed = add_reserve(tensor_bytes)
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return (
        f"{folder}: a checkpoint needs {needed:,} bytes and {free:,} are free; free some, lower checkpoint.keep, or "
        "place the run elsewhere with --runs"
    )


def plain_name(name: object) -> str | None:
    """Return `name` if it is a plain file name, else None.

    A plain name has letters, digits, `.`, `_` and `-`, at most 128, and begins with a letter or a digit.
    """
    return name if isinstance(name, str) and _PLAIN_NAME.fullmatch(name) else None


def unreadable(error: OSError) -> bool:
    """Return whether an error concerns the file itself, so that the checkpoint counts as damaged.

    A failed disk does; a lack of memory does not.
    """
    return error.errno in _UNREADABLE
