"""Passes HTTP requests on to the servers of one model, and passes their answers back as raw bytes.

If a server cannot be reached, or answers 429 or 503, the request is sent to another server. This ends with the first byte of an answer that
goes to the client. A later failure is an error for the client: an event in a stream, else the end of the connection.

A request may be the cause of the loss of its server. After one loss it is sent to one other server only. If that one is lost too, the
request is refused, with an error after which clients do not send it again. After the error `engine_failed` it is not sent again at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from meshwright.connections.limits import ROUTE
from meshwright.server.errors import NO_RETRY, RequestError, content_of, failure_event
from meshwright.server.instances import ServerInstance
from meshwright.server.replies import shown_path
from meshwright.server.response_frames import BadAnswer, ResponseFrames
from meshwright.server.route_requests import MOST_HEAD_BYTES, RoutedRequest, RouteRequestReader
from meshwright.server.router_state import OWN_PATHS, RETRY_SECONDS, Router

log = logging.getLogger("meshwright.server")
BODY_SECONDS = ROUTE.head_seconds
"""Longest time in which a client sends its request."""
IDLE_SECONDS = ROUTE.idle_seconds
"""Longest time of a connection without a request, or without reading its answer."""
UNREAD_SECONDS = 5.0
"""If all servers are full, a client that has not read its answer for this time is disconnected to make room for a request."""
CONNECT_SECONDS = 2.0
"""Longest time for a connection to a server."""
MOST_IDLE = 256
"""Open connections to one server that wait for a request."""
MOST_AHEAD_BYTES = MOST_HEAD_BYTES
"""Most bytes that are read from a client after the request that is being answered."""
MOST_RETRIES_AFTER_LOSS = 1
_RETRIED = (429, 503)
_ENGINE_FAILED = b'"engine_failed"'
_MOST_REFUSAL_BYTES = 64 << 10
"""Most bytes of an answer 429 or 503 that are kept to find its error code."""
_MOST_INTERIM_BYTES = 2 * MOST_HEAD_BYTES
"""Most bytes of a head together with the interim answers (1xx) before it."""
_REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    405: b"Method Not Allowed",
    413: b"Content Too Large",
    429: b"Too Many Requests",
}


class ClientConnection(asyncio.Protocol):
    """The connection of a client. Its requests are answered one at a time, in the order in which they come."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._reader = RouteRequestReader(router.spec.max_body_bytes)
        self._started = 0.0
        self.request: RoutedRequest | None = None
        """The request that is being answered."""
        self._pending: RoutedRequest | None = None
        """A request whose body is still coming."""
        self.server: ServerConnection | None = None
        """The connection to its server."""
        self.paused = False
        """Whether the client must read before more is written to it."""
        self._receiving = False
        """Whether the running timer limits the time in which a request arrives."""
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        """Timer while the client must read before more is written."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        closed = self._router.clients.add(self, IDLE_SECONDS)
        if closed is not None:
            closed.transport.abort()
        if closed is self:
            return
        self._start_timer(IDLE_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._router.clients.remove(self)
        self._stop_timer()
        self._stop_unread_timer()
        self.request = None
        if (server := self.server) is not None:
            self.server = None
            server.cancel()

    def data_received(self, data: bytes) -> None:
        self._reader.add(data)
        if self.request is None:
            self._read_request()
        if len(self._reader) > MOST_AHEAD_BYTES:
            self._update_reading()

    def _update_reading(self) -> None:
        """Read from the client, unless it must read first, or has sent much after the request that is being answered."""
        if self.paused or (self.request is not None and len(self._reader) > MOST_AHEAD_BYTES):
            self.transport.pause_reading()
        elif not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.paused = True
        self._update_reading()
        self._unread_timer = self._loop.call_later(IDLE_SECONDS, self.transport.abort)
        self._router.unread[self] = self._loop.time()
        if self.server is not None:
            self.server.pause()

    def resume_writing(self) -> None:
        self.paused = False
        self._update_reading()
        self._stop_unread_timer()
        if self.server is not None:
            self.server.resume()
        self._loop.call_soon(self._read_next)

    def _read_request(self) -> None:
        """Answer the next request once it is complete and the client reads."""
        if self.paused or not self._reader:
            return
        try:
            if self._pending is None and (head := self._reader.take_head()) is not None:
                self._pending = head
                self._router.admit(head)  # before its body takes memory
            request = self._pending
            if request is None or not self._reader.take_body(request):
                if request is not None and request.expects:
                    request.expects = False
                    self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                if not self._receiving:
                    self._receiving = True
                    self._start_timer(BODY_SECONDS, self.transport.abort)
                return
            self._stop_timer()
            self._pending = None
            self.request = request
            self._receiving = False
            self._router.clients.keep(self)
            self._started = self._loop.time()
            if (own := self._router.own_answer(request)) is not None:
                self._answer(*own)
                return
            self._router.check(request)  # it may be stopping by now
        except RequestError as error:
            if self.request is None:  # what follows is not read
                self.request = self._pending or RoutedRequest()
                self._pending = None
                self.request.keeps_open = False
            self._refuse(error)
            return
        self._start_timer(self._router.spec.first_seconds, self._time_out)
        self.forward()

    def forward(self) -> None:
        """Send the request to a server that has not been tried, or refuse it."""
        assert self.request is not None
        instances = self._router.instances
        instance = instances.choose(self.request.body, self.request.tried)
        if instance is None and self._router.drop_unread(self._loop.time() - UNREAD_SECONDS):
            instance = instances.choose(self.request.body, self.request.tried)
        if instance is not None:
            instance.requests += 1
            self.server = connection = instance.idle.pop() if instance.idle else ServerConnection(instance)
            connection.start(self, self.request)
        elif self.request.losses:
            self._refuse(_lost())
        elif any(instance not in self.request.tried for instance in instances.usable):
            self._refuse(RequestError(429, "all servers are busy; try again later", retry_after=RETRY_SECONDS))
        else:
            error = RequestError(503, "no server can answer; try again", code="no_server", retry_after=RETRY_SECONDS)
            self._refuse(error)

    def retry(self, instance: ServerInstance, *, same: bool = False, lost: bool = False) -> None:
        """Send the request to another server; with `same` to the same one on another connection. Refuse it after the second loss."""
        self.server = None
        if self.request is None:
            return
        self.request.losses += lost
        if self.request.losses > MOST_RETRIES_AFTER_LOSS:
            self._refuse(_lost())
            return
        if same:
            instance.close_idle()  # the server may have closed them as well
        else:
            self.request.tried.add(instance)
        self._router.retries += 1
        self.forward()

    @property
    def has_lost(self) -> bool:
        """Whether a server was lost with the request."""
        return self.request is not None and self.request.losses > 0

    def can_retry(self, instance: ServerInstance) -> bool:
        """Whether another server than `instance` could answer the request."""
        request = self.request
        usable = self._router.instances.usable
        return request is not None and any(other is not instance and other not in request.tried for other in usable)

    def begin_answer(self, status: int) -> None:
        """Note that the first bytes of the answer go to the client. From now on the request is not sent to another server."""
        self._stop_timer()
        if self.request is not None:
            self.request.body = b""
        self._router.statuses[status] += 1
        self._router.first_byte.observe(self._loop.time() - self._started)

    def finish(self, *, keeps_open: bool) -> None:
        """End the request, and begin the client's next one."""
        self.server = None
        request = self.request
        self.request = None
        self._router.clients.wait(self, IDLE_SECONDS)
        self._start_timer(IDLE_SECONDS, self.transport.abort)
        if not keeps_open or request is None or not request.keeps_open:
            self.transport.close()
        elif self._reader:
            self._update_reading()
            self._loop.call_soon(self._read_next)

    def drop(self) -> None:
        """Disconnect the client at once, so that its server can take another request."""
        self.connection_lost(None)
        self.transport.abort()

    def _read_next(self) -> None:
        if self.request is None and not self.transport.is_closing():
            self._read_request()

    def break_off(self, *, between_chunks: bool) -> None:
        """End an answer that its server has not finished: by an error event, if the answer is a stream between two chunks."""
        self._router.broken += 1
        self._log(self._id(), "the server was lost in the answer")
        if between_chunks:
            event = failure_event(_LOST, self._path)
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        self.finish(keeps_open=False)

    @property
    def _path(self) -> str:
        """Path of the request."""
        return "" if self.request is None else self.request.path.decode("latin-1")

    def _time_out(self) -> None:
        if (server := self.server) is not None:
            self.server = None
            server.cancel()
        seconds = self._router.spec.first_seconds
        self._refuse(RequestError(503, f"no answer within {seconds:g} s", code="late", headers=[NO_RETRY]))

    def _refuse(self, error: RequestError) -> None:
        self._answer(error.status, b"application/json", content_of(error, self._path), error.headers)

    def _answer(
        self, status: int, type: bytes, content: bytes, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        """Answer the request without a server."""
        self.begin_answer(status)
        id = self._id()
        if status >= 500 and self.request is not None and self.request.path not in OWN_PATHS:
            self._log(id, str(status))
        lines = [(b"content-type", type), (b"content-length", b"%d" % len(content)), *(headers or [])]
        lines.append((b"x-request-id", id.encode("ascii")))
        keeps_open = self.request is not None and self.request.keeps_open
        if self.request is not None and self.request.method == b"HEAD":
            content = b""
        if not keeps_open:
            lines.append((b"connection", b"close"))
        head = b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"Service Unavailable"))
        self.transport.write(head + b"".join(b"%b: %b\r\n" % line for line in lines) + b"\r\n" + content)
        self.finish(keeps_open=keeps_open)

    def _id(self) -> str:
        """The request's id, of the client or of this router."""
        own = f"r{next(self._router.numbers)}"
        return own if self.request is None else self.request.id or own

    def _log(self, id: str, end: str) -> None:
        """Log how the request has ended."""
        if self.request is not None:
            log.info("request %s: %s: %s", id, shown_path(self.request.path.decode("latin-1")), end)

    def _start_timer(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after a time, in place of the action before."""
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, action)

    def _stop_unread_timer(self) -> None:
        self._router.unread.pop(self, None)
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ServerConnection(asyncio.Protocol):
    """A connection to a server: one request at a time."""

    transport: asyncio.Transport

    def __init__(self, instance: ServerInstance) -> None:
        self._instance = instance
        self._frames = ResponseFrames()
        self._client: ClientConnection | None = None
        self._request: RoutedRequest | None = None
        self._connected = self._used = self._begun = False
        self._first = b""
        """Bytes of the answer before its head is complete."""

    def start(self, client: ClientConnection, request: RoutedRequest) -> None:
        """Send a request; its answer goes to `client`."""
        self._client = client
        self._request = request
        self._frames = ResponseFrames(request.method)
        self._begun = False
        self._first = b""
        self._instance.busy.add(self)
        if self._connected:
            self._send(client, request)
        else:
            self._task = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: self, self._instance.host, self._instance.port)
        except (OSError, TimeoutError):
            self._instance.healthy = False  # until it tells its health again
            self.connection_lost(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connected = True
        if self._request is None or self._client is None:  # the client left while it was opened
            self.transport.abort()
        else:
            self._send(self._client, self._request)

    def _send(self, client: ClientConnection, request: RoutedRequest) -> None:
        if client.paused:
            self.transport.pause_reading()
        self.transport.write(request.head + request.body)

    def pause(self) -> None:
        """Stop reading the answer. A connection that is still being opened asks its client when it is open."""
        if self._connected:
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read the answer again."""
        if self._connected:
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        client = self._client
        frames = self._frames
        instance = self._instance
        instance.heard = instance.clock()
        if client is None:
            self.transport.abort()
            return
        try:
            frames.add(data)
        except BadAnswer:
            self.transport.abort()
            return
        if self._begun:
            client.transport.write(data)
        elif not self._begin(client, self._first + data):
            return
        if frames.complete:
            self._release(keeps_open=frames.keeps_open)
            client.finish(keeps_open=frames.keeps_open)

    def _begin(self, client: ClientConnection, data: bytes) -> bool:
        """Pass on the beginning of an answer. Not if its head is incomplete, or if the request goes to another server."""
        status = self._frames.status
        refused = status in _RETRIED and (client.has_lost or client.can_retry(self._instance))
        if not status or (refused and not self._frames.complete and len(data) <= _MOST_REFUSAL_BYTES):
            self._first = data
            if len(data) > _MOST_INTERIM_BYTES:
                self.transport.abort()
            return False
        if refused and (not (failed := _ENGINE_FAILED in data) or client.has_lost):
            self._release(keeps_open=False)
            client.retry(self._instance, lost=failed)
            return False
        self._begun = True
        self._first = b""
        self._instance.answered += 1
        client.begin_answer(status)
        client.transport.write(data)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        client = self._client
        begun = self._begun
        used = self._used
        frames = self._frames
        connected = self._connected
        self._connected = False
        if self in self._instance.idle:
            self._instance.idle.remove(self)
        self._release(keeps_open=False)
        if client is None:
            return
        if not begun:
            # A server may close an idle connection just when a request is sent on it.
            client.retry(self._instance, same=connected and used and self._instance.healthy, lost=connected)
        elif frames.ends_with_connection:
            client.finish(keeps_open=False)
        else:
            client.break_off(between_chunks=frames.between_chunks)

    def cancel(self) -> None:
        """The client has left: close the connection, so that the server stops the request."""
        self._release(keeps_open=False)

    def abort(self) -> None:
        """Close the connection; its request ends or is sent to another server."""
        if self._connected:
            self.transport.abort()

    def _release(self, *, keeps_open: bool) -> None:
        """End the request; the connection is used again or closed."""
        if self._client is not None:
            self._instance.requests -= 1
            self._instance.busy.discard(self)
        self._client = self._request = None
        if not self._connected:
            return
        if keeps_open and self._instance.healthy and len(self._instance.idle) < MOST_IDLE:
            self._used = True
            self.transport.resume_reading()
            self._instance.idle.append(self)
        else:
            self.transport.abort()


def _lost() -> RequestError:
    """The error for a request that is not sent again after its server was lost."""
    text = "the server was lost before its answer; the request may be the cause and is not sent again"
    return RequestError(503, text, code="server_lost", headers=[NO_RETRY])


_LOST = RequestError(503, "the server was lost; try again", code="server_lost")
"""The error of a stream whose server was lost."""
