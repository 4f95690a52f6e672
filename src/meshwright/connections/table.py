"""The connections of one listener: how many there may be, which one is closed for a new one, and which exceed their time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from meshwright.connections.limits import ListenerLimits

Connection = TypeVar("Connection", bound=Hashable)


class ConnectionTable(Generic[Connection]):
    """Limits the connections of a listener.

    It closes no connection itself: its methods return those that the caller must close.

    A connection is waiting if it has no request, or has not shown the key. If the table is full, the connection that
    has waited longest is closed for a new one. So idle connections of strangers cannot keep others out.
    """

    def __init__(self, limits: ListenerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self.limits = limits
        self._clock = clock
        self._most = limits.most
        self._deadlines: dict[Connection, float] = {}
        self._waiting: dict[Connection, None] = {}
        """Connections that wait, the longest-waiting first. (A dict is used as an ordered set.)"""

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._deadlines)

    def __contains__(self, connection: object) -> bool:
        return connection in self._deadlines

    def add(self, connection: Connection, seconds: float) -> Connection | None:
        """Add a connection that may wait for `seconds`. Return a connection to be closed, or None.

        If the table is full and no connection waits, the new connection itself is returned and not added.
        """
        closed = None
        if len(self._deadlines) >= self._most:
            closed = next(iter(self._waiting), None)
            if closed is None:
                return connection
            self.remove(closed)
        self._deadlines[connection] = self._clock() + seconds
        self._waiting[connection] = None
        return closed

    def wait(self, connection: Connection, seconds: float) -> None:
        """Note that a connection waits from now on, for at most `seconds`.

        This method and the following ones ignore a connection that has been removed.
        """
        if connection in self._deadlines:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None
            self._deadlines[connection] = self._clock() + seconds

    def keep(self, connection: Connection, seconds: float = math.inf) -> None:
        """Note that a connection has work. It is not closed for a new one, but it is late after `seconds`."""
        if connection in self._deadlines:
            self._waiting.pop(connection, None)
            self._deadlines[connection] = self._clock() + seconds

    def limit(self, connection: Connection, seconds: float) -> None:
        """Set the seconds after which a connection is late. Whether it may be closed for a new one does not change."""
        if connection in self._deadlines:
            self._deadlines[connection] = self._clock() + seconds

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has been closed."""
        self._waiting.pop(connection, None)
        self._deadlines.pop(connection, None)

    def late(self) -> list[Connection]:
        """Return the connections that have exceeded their time."""
        now = self._clock()
        return [connection for connection, deadline in self._deadlines.items() if now > deadline]
