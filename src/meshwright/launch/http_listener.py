"""A small HTTP/1.1 server with keep-alive, for few and short requests. One thread serves all connections with `selectors`.

Sizes of heads and bodies, the number of connections, and times are limited before anything is known about a client
(`connections/limits.py`). No client can make `serve` raise.
"""

from __future__ import annotations

import http.client
import selectors
import socket
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from meshwright.connections.accept import Acceptor
from meshwright.connections.limits import ListenerLimits
from meshwright.connections.table import ConnectionTable

SWEEP_SECONDS = 1.0
"""Seconds between two checks for connections that have exceeded a time limit."""


@dataclass
class HttpRequest:
    """The head of a request. Header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    length: int = 0
    """Size of the body in bytes."""


@dataclass(frozen=True)
class HttpReply:
    """An answer. `headers` are in addition to content type and content length."""

    status: int
    content: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(eq=False)
class HttpConnection:
    """The connection of a client."""

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unsent: bytes = b""
    closing: bool = False
    request: HttpRequest | None = None
    """A request whose body has not arrived completely; None without one."""
    trusted: bool = False
    """Whether the client has shown the key. A trusted connection is never closed to make room for others."""
    state: Any = None
    """Data of the listener's subclass about this connection."""


class HttpListener(ABC):
    """Serves requests on a listening socket. Subclasses decide which requests are admitted, and answer them."""

    body_bytes = 0
    """Largest body of a request."""
    answer_bytes = 1 << 20
    """If more than this many bytes wait to be sent to a client, because it does not read, its connection is closed."""

    def __init__(self, listener: socket.socket, limits: ListenerLimits) -> None:
        self._listener = listener
        self._limits = limits
        self._acceptor = Acceptor(listener)
        self._table: ConnectionTable[HttpConnection] = ConnectionTable(limits)
        self._connections: dict[HttpConnection, None] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._swept = time.monotonic()

    @abstractmethod
    def admit(self, connection: HttpConnection, request: HttpRequest) -> int:
        """0 if the request is admitted, otherwise the status with which it is refused. Called before its body is read."""

    @abstractmethod
    def answer(self, connection: HttpConnection, request: HttpRequest, body: bytes) -> HttpReply:
        """The answer to an admitted request. After an answer with status 401, the connection is closed."""

    def serve(self, seconds: float) -> None:
        """Wait for requests for at most `seconds`, answer those that arrive, and return."""
        for key, mask in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
                continue
            connection: HttpConnection = key.data
            if connection not in self._connections:  # it was closed to make room for another
                continue
            try:
                if mask & selectors.EVENT_READ:
                    self._receive(connection)
                if connection.unsent:
                    self._send(connection)
            except OSError:
                self._close(connection)
        self._close_late()

    def close(self) -> None:
        """Close all connections and the listening socket."""
        for connection in list(self._connections):
            self._close(connection)
        self._listener.close()
        self._acceptor.close()
        self._selector.close()

    def _accept(self) -> None:
        for accepted in self._acceptor.accept():
            connection = HttpConnection(accepted)
            closed = self._table.add(connection, self._limits.head_seconds)
            if closed is connection:
                accepted.close()
                continue
            if closed is not None:
                self._close(closed)
            with suppress(OSError):  # the client may have left
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setblocking(False)
            self._connections[connection] = None
            self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _receive(self, connection: HttpConnection) -> None:
        data = connection.socket.recv(1 << 16)
        if not data:
            self._close(connection)
            return
        if connection.trusted:
            self._table.keep(connection, self._limits.idle_seconds)
        connection.received += data
        while not connection.closing and self._answer_next(connection):
            pass

    def _answer_next(self, connection: HttpConnection) -> bool:
        """Answer the next complete request in the buffer; False if there is none."""
        request = connection.request or self._read_head(connection)
        if request is None or len(connection.received) < request.length:
            return False
        body = bytes(connection.received[: request.length])
        del connection.received[: request.length]
        connection.request = None
        reply = self.answer(connection, request, body)
        if reply.status == 401:
            return self._refuse(connection, 401)
        self._reply(connection, reply)
        return True

    def _read_head(self, connection: HttpConnection) -> HttpRequest | None:
        """The next request, if its head is complete and it is admitted; else None."""
        received = connection.received
        head_end = received.find(b"\r\n\r\n", 0, self._limits.head_bytes)
        if head_end < 0:
            if len(received) >= self._limits.head_bytes:
                self._refuse(connection, 431)
            return None
        request = _parse_head(bytes(received[:head_end]))
        del received[: head_end + 4]
        status = 400 if request is None else self.admit(connection, request) or self._check_length(connection, request)
        if status:
            self._refuse(connection, status)
            return None
        connection.request = request
        return request

    def _check_length(self, connection: HttpConnection, request: HttpRequest) -> int:
        """Read the length of a request's body. Returns 0, or the status with which the request must be refused."""
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or not (length.isascii() and length.isdigit()):
            return 411
        if len(length) > 9 or int(length) > (self.body_bytes if connection.trusted else 0):
            return 413
        request.length = int(length)
        return 0

    def trust(self, connection: HttpConnection) -> None:
        """Mark a client that has shown the key as trusted."""
        connection.trusted = True
        self._table.keep(connection, self._limits.idle_seconds)

    def _refuse(self, connection: HttpConnection, status: int) -> bool:
        """Answer with an error and close the connection. What else the client has sent is not read. Returns False."""
        connection.closing = True
        connection.received.clear()
        text = http.client.responses[status]
        self._reply(connection, HttpReply(status, b'{"error": "%b"}' % text.encode()))
        return False

    def _reply(self, connection: HttpConnection, reply: HttpReply) -> None:
        lines = [
            f"HTTP/1.1 {reply.status} {http.client.responses[reply.status]}",
            f"Content-Type: {reply.content_type}",
            f"Content-Length: {len(reply.content)}",
            f"Connection: {'close' if connection.closing else 'keep-alive'}",
            *(f"{name}: {value}" for name, value in reply.headers),
        ]
        connection.unsent += "\r\n".join([*lines, "\r\n"]).encode() + reply.content
        if len(connection.unsent) > self.answer_bytes:  # the client sends requests and does not read answers
            raise ConnectionError

    def _send(self, connection: HttpConnection) -> None:
        try:
            sent = connection.socket.send(connection.unsent)
        except BlockingIOError:
            sent = 0
        connection.unsent = connection.unsent[sent:]
        if connection.closing and not connection.unsent:
            self._close(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, events, connection)

    def _close(self, connection: HttpConnection) -> None:
        self._table.remove(connection)
        if connection in self._connections:
            del self._connections[connection]
            self._selector.unregister(connection.socket)
            connection.socket.close()
        connection.unsent = b""

    def _close_late(self) -> None:
        now = time.monotonic()
        if now - self._swept < SWEEP_SECONDS:
            return
        self._swept = now
        for connection in self._table.late():
            self._close(connection)


def _parse_head(head: bytes) -> HttpRequest | None:
    """The request in a head; None if it is not HTTP/1.1."""
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or parts[2] != "HTTP/1.1":
        return None
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip() or name.lower() in headers:
            return None
        headers[name.lower()] = value.strip()
    return HttpRequest(parts[0], parts[1], headers)
