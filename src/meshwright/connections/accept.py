"""Accepts connections without blocking.

If the process has too many open files, it neither fails nor retries in a tight loop.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress

BACKLOG = 128
"""Most connections that may wait to be accepted."""
AT_ONCE = 64
"""Most connections that one call accepts."""
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors that mean that no further file can be opened."""
PAUSE_SECONDS = 0.05
"""Seconds to sleep if no connection can be accepted. Otherwise the caller would try again at once."""


def listen_at(address: tuple[str, int], backlog: int = BACKLOG) -> socket.socket:
    """Return a listening socket at (host, port), for IPv4 or IPv6. Raises OSError, for example if the port is in use."""
    host, port = address
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server(address, family=family, backlog=backlog)


class Acceptor:
    """Accepts connections at a listening socket.

    It keeps one spare file descriptor. If the process can open no further file, a waiting connection would make every
    call of `select` return at once. The acceptor then closes the spare descriptor, accepts the connection, and closes
    it.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._reserve: int | None = None
        self._fill_reserve()

    def accept(self) -> list[socket.socket]:
        """Return waiting connections, at most `AT_ONCE`. This never raises OSError."""
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
                if error.errno in (errno.EBADF, errno.EINVAL):  # the listening socket is closed
                    break
        else:
            if not accepted:  # every attempt has failed, and the next call would fail at once too
                time.sleep(PAUSE_SECONDS)
        return accepted

    def close(self) -> None:
        """Close the spare descriptor. The caller closes the listening socket."""
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _refuse(self) -> None:
        """Accept and close one waiting connection, using the spare descriptor, and open a new spare descriptor."""
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
