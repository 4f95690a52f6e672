"""A lock on a folder, held by one process of one host at a time."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from meshwright.spec.errors import BadInput

LOCK = ".lock"
OPEN_ATTEMPTS = 1000
log = logging.getLogger("meshwright")


@contextmanager
def locked(directory: Path, wait: bool, instead: str = "choose another --out") -> Iterator[bool]:
    """Hold the one lock of `directory` for the length of a `with` block; yields False where the file system has no locks.

    The directory is made when missing, and removed when it is left empty, with the parents that were made for it.

    Raises BadInput when another process holds it and `wait` is false, naming that process and what may be done `instead` of waiting.
    """
    path = directory / LOCK
    missing = [parent for parent in directory.parents if not parent.exists()]
    try:
        file, exclusive = _acquire(path, wait, instead)
        try:
            yield exclusive
        finally:
            if _has_name(file, path):  # else another process has taken over
                path.unlink(missing_ok=True)
            file.close()
    finally:
        with suppress(OSError):  # not empty: the usual case
            for empty in (directory, *missing):
                empty.rmdir()


def _acquire(path: Path, wait: bool, instead: str) -> tuple[TextIO, bool]:
    """The lock file, open, and whether it is locked.

    A lock counts only while its file has the name `path`: a holder removes the file before it releases the lock, so another process can
    lock a file without a name for a moment. Nobody is refused because of such a lock; both processes try again.
    """
    while True:
        file = _open(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            with file:
                file.seek(0)
                holder = file.read().strip() or "another process"
                if not _has_name(file, path):
                    continue
            raise BadInput(f"{path.parent}: {holder} is writing here; wait for it, or {instead}") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                file.close()
                raise
            log.warning("%s: nothing keeps other processes out: %s", path.parent, error.strerror)
            return file, False
        if _has_name(file, path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            return file, True
        file.close()


def _open(path: Path) -> TextIO:
    """Open the lock file; create it and its folder if they are missing.

    Another process may remove the empty folder in between.
    """
    for _ in range(OPEN_ATTEMPTS):
        with suppress(FileNotFoundError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("a+")
    raise BadInput(
        f"{path}: cannot be created; its folder is removed again and again, or it is a link that leads nowhere"
    )


def _has_name(file: TextIO, path: Path) -> bool:
    """Whether `path` still names the open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
