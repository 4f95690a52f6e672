"""The connections of one listener: how many there may be, which one makes room for another, and which are late."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from meshwright.connections.limits import ListenerLimits

Connection = TypeVar("Connection", bound=Hashable)


class ConnectionTable(Generic[Connection]):
    """Bounds the connections of a listener. It closes none itself: its methods return those that the caller closes.

    A connection that waits, without a request or without having shown the key, makes room for a new one when the table
    is full: idle connections of strangers cannot keep others out.
    """

    def __init__(self, limits: ListenerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._most = limits.most
        self._deadlines: dict[Connection, float] = {}
        self._waiting: dict[Connection, None] = {}
        """Those that wait, the longest first."""

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._deadlines)

    def __contains__(self, connection: object) -> bool:
        return connection in self._deadlines

    def add(self, connection: Connection, seconds: float) -> Connection | None:
        """Add a connection that waits at most so many seconds; returns one to be closed, which may be this one."""
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
        """Note that a connection waits from now on, at most so many seconds; one that is closed is ignored, here and below."""
        if connection in self._deadlines:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None
            self._deadlines[connection] = self._clock() + seconds

    def keep(self, connection: Connection, seconds: float = math.inf) -> None:
        """Note that a connection has work: it makes no room for others, but is late after so many seconds."""
        if connection in self._deadlines:
            self._waiting.pop(connection, None)
            self._deadlines[connection] = self._clock() + seconds

    def limit(self, connection: Connection, seconds: float) -> None:
        """Set the time after which a connection is late; whether it makes room for others stays."""
        if connection in self._deadlines:
            self._deadlines[connection] = self._clock() + seconds

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._waiting.pop(connection, None)
        self._deadlines.pop(connection, None)

    def late(self) -> list[Connection]:
        """The connections whose time is over."""
        now = self._clock()
        return [connection for connection, deadline in self._deadlines.items() if now > deadline]
