"""Control plane between agents and coordinator: JSON over HTTP/1.1 with keep-alive and a job token.

One thread serves all connections with `selectors`. Every request needs the token in `Authorization: Bearer`; it is
compared in constant time, before the body is read. Requests, headers and the number of connections are limited.
"""

from __future__ import annotations

import hmac
import http.client
import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshwright.launch.reports import Directive, Report
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.rank_environment import COORDINATOR_VARIABLE

HEAD_BYTES, BODY_BYTES, CONNECTIONS = 8 << 10, 1 << 20, 8192
"""Most bytes of a request's head and body, and most connections at a time."""
IDLE_SECONDS, UNKNOWN_SECONDS = 60.0, 10.0
"""Seconds after which a connection without a request is closed; and one that has not sent the token."""
CONNECT_SECONDS, ANSWER_SECONDS = 3.0, 10.0
"""Longest time to connect to the coordinator, and to wait for its answer."""

Handler = Callable[[Any], Any]
"""Answers the JSON value of a request with a JSON value. Raises ValueError, TypeError or KeyError for a bad one."""


def coordinator_address(text: str | None) -> tuple[str, int]:
    """HOST:PORT as a pair. Raises BadInput for another form."""
    host, _, port = (text or "").rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise BadInput(
            f"{COORDINATOR_VARIABLE} is {text!r}; expected HOST:PORT of the coordinator, e.g. 10.0.0.1:29400"
        )
    return host.strip("[]"), int(port)


def listen(address: tuple[str, int]) -> socket.socket:
    """A listening socket at the address. Raises OSError, e.g. if it is another host's or in use."""
    return socket.create_server(address, backlog=1024)


@dataclass
class _Connection:
    socket: socket.socket
    used: float
    authorised: bool = False
    received: bytearray = field(default_factory=bytearray)
    unsent: bytes = b""
    closing: bool = False


class ControlServer:
    """Serves requests on a listening socket. `handlers` are by method and path, e.g. `POST /report`."""

    def __init__(self, listener: socket.socket, token: str, handlers: dict[str, Handler]) -> None:
        self._listener, self._token, self._handlers = listener, token.encode(), handlers
        self._selector = selectors.DefaultSelector()
        self._connections: dict[socket.socket, _Connection] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._swept = time.monotonic()

    def serve(self, seconds: float) -> None:
        """Answer requests that arrive; returns after the first ones, or after `seconds` without any."""
        for key, mask in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
                continue
            connection: _Connection = key.data
            try:
                if mask & selectors.EVENT_READ:
                    self._receive(connection)
                if connection.unsent:
                    self._send(connection)
            except OSError:
                self._close(connection)
        self._close_idle()

    def close(self) -> None:
        """Close all connections and the listening socket."""
        for connection in list(self._connections.values()):
            self._close(connection)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(64):
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            if len(self._connections) >= CONNECTIONS:
                accepted.close()
                continue
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(accepted, time.monotonic())
            self._connections[accepted] = connection
            self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        data = connection.socket.recv(1 << 16)
        if not data:
            self._close(connection)
            return
        if connection.authorised:
            connection.used = time.monotonic()
        connection.received += data
        while not connection.closing and self._answer_next(connection):
            pass

    def _answer_next(self, connection: _Connection) -> bool:
        """Answer the next complete request in the buffer; False if there is none."""
        received = connection.received
        head_end = received.find(b"\r\n\r\n", 0, HEAD_BYTES)
        if head_end < 0:
            if len(received) >= HEAD_BYTES:
                self._refuse(connection, 431)
            return False
        request = _parse_head(bytes(received[:head_end]))
        if request is None:
            return self._refuse(connection, 400)
        method, path, headers = request
        authorization = headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(authorization, b"Bearer " + self._token):
            return self._refuse(connection, 401)
        connection.authorised = True
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not (length.isascii() and length.isdigit()):
            return self._refuse(connection, 411)
        if len(length) > 9 or int(length) > BODY_BYTES:
            return self._refuse(connection, 413)
        start, stop = head_end + 4, head_end + 4 + int(length)
        if len(received) < stop:
            return False
        body = bytes(received[start:stop])
        del received[:stop]
        self._answer(connection, f"{method} {path}", body)
        return True

    def _answer(self, connection: _Connection, request: str, body: bytes) -> None:
        handler = self._handlers.get(request)
        if handler is None:
            self._reply(connection, 404, {"error": f"no {request[:100]}"})
            return
        try:
            answer = handler(json.loads(body) if body else None)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._reply(connection, 400, {"error": str(error)[:200]})
            return
        self._reply(connection, 200, answer)

    def _refuse(self, connection: _Connection, status: int) -> bool:
        """Answer with an error and close: what follows on the connection is not read."""
        connection.closing = True
        connection.received.clear()
        self._reply(connection, status, {"error": http.client.responses[status]})
        return False

    def _reply(self, connection: _Connection, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} {http.client.responses[status]}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: {'close' if connection.closing else 'keep-alive'}\r\n\r\n"
        connection.unsent += head.encode() + body
        if len(connection.unsent) > BODY_BYTES:  # a client that sends and does not read
            raise ConnectionError

    def _send(self, connection: _Connection) -> None:
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

    def _close(self, connection: _Connection) -> None:
        if self._connections.pop(connection.socket, None) is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()
        connection.unsent = b""

    def _close_idle(self) -> None:
        now = time.monotonic()
        if now - self._swept < 1.0:
            return
        self._swept = now
        for connection in list(self._connections.values()):
            if now - connection.used > (IDLE_SECONDS if connection.authorised else UNKNOWN_SECONDS):
                self._close(connection)


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]] | None:
    """Method, path and headers (names in lower case) of a request; None if it is not HTTP/1.1."""
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
    return parts[0], parts[1], headers


class ControlClient:
    """An agent's connection to the coordinator."""

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self._address = address
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._connection: http.client.HTTPConnection | None = None

    def report(self, report: Report) -> Directive:
        """Send a report and return the answer.

        Raises OSError if the coordinator cannot be reached, and BadInput if it refuses the token or the report.
        """
        return from_plain(Directive, self.request("POST", "/report", to_plain(report)))

    def request(self, method: str, path: str, value: Any = None) -> Any:
        """The answer to a request."""
        connection = self._connection or http.client.HTTPConnection(*self._address, timeout=CONNECT_SECONDS)
        try:
            if connection.sock is None:
                connection.connect()
                assert connection.sock is not None, "it is connected"
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sock.settimeout(ANSWER_SECONDS)
            connection.request(method, path, None if value is None else json.dumps(value), self._headers)
            response = connection.getresponse()
            body = json.loads(response.read(BODY_BYTES) or b"null")
        except (http.client.HTTPException, ValueError) as error:
            connection.close()
            raise ConnectionError(f"no answer of a coordinator: {error}") from error
        except OSError:
            connection.close()
            raise
        self._connection = connection
        if response.status != 200:
            address = f"{self._address[0]}:{self._address[1]}"
            raise BadInput(f"the coordinator at {address} answers {response.status}: {(body or {}).get('error')}")
        return body

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
