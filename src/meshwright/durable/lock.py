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
"""Name of the lock file in the folder."""
OPEN_ATTEMPTS = 1000
"""How often the lock file is created again if other processes remove its folder at the same time."""
log = logging.getLogger("meshwright")


def this_process(pid: int | None = None) -> str:
    """Return the name by which locks call this process, or the process `pid` of this host."""
    return f"process {pid or os.getpid()} on {socket.gethostname()}"


def break_lock(directory: Path, process: str) -> None:
    """Remove the lock of `directory` if `process` (the result of `this_process`) holds it. It must not write there any more.

    A file system may hold the lock of a lost host for minutes. The lock of another process stays.
    """
    path = directory / LOCK
    with suppress(FileNotFoundError):
        if path.read_text(encoding="utf-8", errors="replace").strip() == process:
            path.unlink()


@contextmanager
def locked(directory: Path, wait: bool, alternative: str = "choose another --out") -> Iterator[bool]:
    """Hold the lock of `directory` within a `with` block. Yields False if the file system has no locks, else True.

    The directory and its parents are created if they are missing. At the end, `directory` and the folders that this call
    created are removed if they are empty. Raises BadInput if another process holds the lock and `wait` is false. The error
    names that process, and `alternative`, what the user can do other than wait.
    """
    path = directory / LOCK
    missing = [parent for parent in directory.parents if not parent.exists()]
    try:
        file, exclusive = _acquire(path, wait, alternative)
        try:
            yield exclusive
        finally:
            if _has_name(file, path):  # otherwise another process has taken the lock
                path.unlink(missing_ok=True)
            file.close()
    finally:
        with suppress(OSError):  # not empty: the usual case
            for empty in (directory, *missing):
                empty.rmdir()


def _acquire(path: Path, wait: bool, alternative: str) -> tuple[TextIO, bool]:
    """Return the open lock file, and whether it is locked.

    A lock counts only while its file has the name `path`. A holder removes the file before it releases the lock, so that
    another process may lock a file without a name for a moment. Then this is no error, and the process tries again.
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
            with suppress(OSError):  # on a full disk the lock is held, but its file does not name the process
                file.truncate(0)
                os.write(file.fileno(), f"{this_process()}\n".encode())
            return file, True
        file.close()


def _open(path: Path) -> TextIO:
    """Open the lock file. Creates it and its folder if they are missing.

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
    """Return whether `path` is still the name of the open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
