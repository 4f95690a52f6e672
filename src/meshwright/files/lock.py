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
log = logging.getLogger("meshwright")


@contextmanager
def locked(directory: Path, wait: bool, instead: str = "choose another --out") -> Iterator[None]:
    """Hold the one lock of `directory` (made when missing) for the length of a `with` block.

    Raises BadInput when another process holds it and `wait` is false, naming that process and what may be done `instead` of waiting.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    file = _acquire(path, wait, instead)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _acquire(path: Path, wait: bool, instead: str) -> TextIO:
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            with file:
                file.seek(0)
                holder = file.read().strip() or "another process"
            raise BadInput(f"{path.parent}: {holder} is writing here; wait for it, or {instead}") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            log.warning("%s: nothing keeps other processes out: %s", path.parent, error.strerror)
            return file
        # The last holder may have removed the file between our open and our lock; a lock on a nameless file is no lock. Another may be
        # removing the one that has the name now.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
                return file
        file.close()
