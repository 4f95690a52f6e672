"""Accepting connections without blocking: a full table of open files ends nothing and does not spin."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress

BACKLOG = 128
"""Connections that may wait to be accepted."""
AT_ONCE = 64
"""Most connections that one call accepts."""
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE_SECONDS = 0.05
"""Pause while the table is full and no descriptor is in reserve; the caller would try again at once."""


def listen_at(address: tuple[str, int], backlog: int = BACKLOG) -> socket.socket:
    """A listening socket at a host and port, of IPv4 or IPv6. Raises OSError, e.g. if it is another host's or in use."""
    host, port = address
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server(address, family=family, backlog=backlog)


class Acceptor:
    """Accepts connections at a listening socket.

    While the table of open files is full, it gives up a descriptor that it has in reserve to accept a connection and
    close it: those that wait would make every call of `select` return at once.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._reserve: int | None = None
        self._fill_reserve()

    def accept(self) -> list[socket.socket]:
        """The connections that wait, at most `AT_ONCE`; never raises OSError."""
        accepted: list[socket.socket] = []
        for _ in range(AT_ONCE):
            try:
                accepted.append(self._listener.accept()[0])
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in FULL:
                    self._refuse()
                    break
                if error.errno in (errno.EBADF, errno.EINVAL):  # it is closed
                    break
        else:
            if not accepted:  # every call fails, and would again at once
                time.sleep(PAUSE_SECONDS)
        return accepted

    def close(self) -> None:
        """Close the descriptor in reserve; the listening socket is the caller's."""
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _refuse(self) -> None:
        """Close one connection that waits, and try to have a descriptor in reserve again."""
        if self._reserve is None:
            time.sleep(PAUSE_SECONDS)
        else:
            os.close(self._reserve)
            self._reserve = None
            with suppress(OSError):
                self._listener.accept()[0].close()
        self._fill_reserve()

    def _fill_reserve(self) -> None:
        with suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
