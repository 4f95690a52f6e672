"""uvicorn's protocol of HTTP with limits of what a client may do before its request is known.

httptools has no limit of heads, and uvicorn none of connections, of the time for a head, or of clients that read nothing
of their answer.
"""

from __future__ import annotations

import http
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from meshwright.connections.limits import ListenerLimits
from meshwright.connections.table import ConnectionTable
from meshwright.server.errors import RequestError

MOST_PIPELINED = 16
"""Requests that may wait behind the one that is being answered."""
_LOGGER = logging.getLogger("uvicorn.error.protocol")
_LOGGER.setLevel(logging.ERROR)
"""Without uvicorn's warning for each malformed request, by which strangers would fill the log."""
_HEAD_END = b"\r\n\r\n"


def limited_protocol(table: ConnectionTable[Any]) -> type[LimitedProtocol]:
    """The protocol of a server whose connections are in `table`; call `close_late` with it every second."""
    return type("Protocol", (LimitedProtocol,), {"table": table})


def close_late(table: ConnectionTable[Any]) -> None:
    """Close the connections whose time is over."""
    for protocol in table.late():
        protocol.transport.abort()


class LimitedProtocol(HttpToolsProtocol):
    """A connection of the table."""

    table: ConnectionTable[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _LOGGER
        self._limits: ListenerLimits = self.table.limits
        self._in_head = True
        """Whether a head is next or has begun."""
        self._room = self._limits.head_bytes
        """Bytes that the head may still have."""
        self._tail = b""
        """Last bytes of the head so far."""
        self._running: Any = None
        """The request that is being answered; uvicorn knows the one that came last."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        closed = self.table.add(self, self._limits.head_seconds)
        if closed is not None:
            closed.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.remove(self)
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._in_head and not self._fits(data):
            self._refuse_head()
            return
        super().data_received(data)

    def _fits(self, data: bytes) -> bool:
        """Whether the head ends in the bytes that come now, or may still go on after them."""
        known = self._tail + data if self._tail else data
        if known.find(_HEAD_END, 0, self._room + len(self._tail)) >= 0:
            return True
        if self._room == self._limits.head_bytes:
            self.table.limit(self, self._limits.head_seconds)
        self._room -= len(data)
        self._tail = known[-len(_HEAD_END) + 1 :]
        return self._room > 0

    def _refuse_head(self) -> None:
        if (
            self.cycle is not None and not self.cycle.response_complete
        ):  # it comes behind a request that is being answered
            self.transport.abort()
            return
        error = RequestError(431, f"the head is longer than {self._limits.head_bytes} bytes")
        head = f"HTTP/1.1 431 {http.HTTPStatus(431).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(error.content)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode("ascii") + error.content)
        self.transport.close()
        self.table.limit(self, self._limits.head_seconds)

    def on_headers_complete(self) -> None:
        self._in_head = False
        # The body is read within BODY_SECONDS (`replies.py`), or answered before it has come.
        self.table.keep(self, 2 * self._limits.head_seconds)
        if len(self.pipeline) >= MOST_PIPELINED:
            self.transport.abort()
            raise ValueError("too many requests at once")
        waiting = len(self.pipeline)
        super().on_headers_complete()
        if len(self.pipeline) == waiting:
            self._running = self.cycle

    def on_message_complete(self) -> None:
        self._in_head = True
        self._room = self._limits.head_bytes
        self._tail = b""
        super().on_message_complete()
        if self.cycle.response_complete:
            self._wait()
        else:
            self.table.keep(self)

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self._in_head and self.cycle.response_complete:
            self._wait()

    def _wait(self) -> None:
        """Wait for the next request; or for a client that must still read the answer, which ends the connection."""
        self.table.wait(self, self._limits.idle_seconds)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.table.limit(self, self._limits.idle_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cycle is not None and not self.cycle.response_complete:
            self.table.keep(self)
