"""A lock on a folder, which one process can hold at a time."""

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
"""Attempts to create a lock file whose folder other processes remove at the same time."""
log = logging.getLogger("meshwright")


def this_process(pid: int | None = None) -> str:
    """This process, or another one of this host, as its locks name it."""
    return f"process {pid or os.getpid()} on {socket.gethostname()}"


def break_lock(directory: Path, process: str) -> None:
    """Take the lock of `directory` away from `process` (`this_process`), which must not write there any more.

    A file system may hold the lock of a lost host for minutes. Another process keeps its lock.
    """
    path = directory / LOCK
    with suppress(FileNotFoundError):
        if path.read_text(encoding="utf-8", errors="replace").strip() == process:
            path.unlink()


@contextmanager
def locked(directory: Path, wait: bool, alternative: str = "choose another --out") -> Iterator[bool]:
    """Hold the lock of `directory` for a `with` block; yields False where the file system has no locks.

    The directory and its parents are created if missing. At the end, those that this call created are removed if they are empty, as is
    an empty `directory`. Raises BadInput if another process holds the lock and `wait` is false; the error names that process and the
    `alternative` to waiting.
    """
    path = directory / LOCK
    missing = [parent for parent in directory.parents if not parent.exists()]
    try:
        file, exclusive = _acquire(path, wait, alternative)
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


def _acquire(path: Path, wait: bool, alternative: str) -> tuple[TextIO, bool]:
    """The lock file, open, and whether it is locked.

    A lock counts only while its file has the name `path`: a holder removes the file before it releases the lock, so another process can
    lock a file without a name for a moment. Such a lock causes no error; both processes try again.
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
            raise BadInput(f"{path.parent}: {holder} is writing here; wait for it, or {alternative}") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                file.close()
                raise
            log.warning("%s: the folder cannot be locked against other processes: %s", path.parent, error.strerror)
            return file, False
        if _has_name(file, path):
            with suppress(OSError):  # on a full disk the lock holds without a name
                file.truncate(0)
                os.write(file.fileno(), f"{this_process()}\n".encode())
            return file, True
        file.close()


def _open(path: Path) -> TextIO:
    """Open the lock file; create it and its folder if they are missing.

    Another process may remove the empty folder in between, even between two system calls of `Path.mkdir`.
    """
    for _ in range(OPEN_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("a+", encoding="utf-8", errors="replace")
        except FileNotFoundError:
            continue
        except FileExistsError as error:
            if os.path.lexists(error.filename) and not os.path.isdir(error.filename):
                raise
    raise BadInput(
        f"{path}: cannot be created; its folder is removed again and again, or it is a link to a missing file"
    )


def _has_name(file: TextIO, path: Path) -> bool:
    """Whether `path` still names the open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
