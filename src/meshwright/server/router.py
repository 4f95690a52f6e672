"""The connections of the router: it passes HTTP requests on to the servers of one model, and passes the answers back as raw bytes.

Retries: if a server cannot be reached, or answers 429 or 503, the router sends the request to another server. Once the first byte of an
answer has gone to the client, the router does not send the request again. If the server fails later, the client gets an error event if the
answer is a stream, and else the connection is closed.

Lost servers: a request may be the reason why its server was lost, for example by crashing it. So after a lost connection, the request is
sent to one other server only. If that server is lost too, the router refuses the request with an error that tells clients not to retry. If
a server answers with the error `engine_failed`, the client gets this answer, and the request is not sent to another server.
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
"""A client must send a request within this time, in seconds, after its first byte."""
IDLE_SECONDS = ROUTE.idle_seconds
"""A client's connection is closed after this time without a request, or without reading its answer."""
UNREAD_SECONDS = 5.0
"""If all servers are full, the router disconnects a client that has not read its answer for this time, to make room for a request."""
CONNECT_SECONDS = 2.0
"""The router must be able to connect to a server within this time."""
MOST_IDLE = 256
"""The router keeps at most this many open connections to one server that have no request."""
MOST_AHEAD_BYTES = MOST_HEAD_BYTES
"""While a request is being answered, the router stops reading from the client after this many bytes of further requests."""
MOST_RETRIES_AFTER_LOSS = 1
"""A request is sent again at most this many times after its server was lost."""
_RETRIED = (429, 503)
"""HTTP statuses after which a request is sent to another server."""
_ENGINE_FAILED = b'"engine_failed"'
_MOST_REFUSAL_BYTES = 64 << 10
"""The router waits for at most this many bytes of an answer with status 429 or 503, to find the error code in it."""
_MOST_INTERIM_BYTES = 2 * MOST_HEAD_BYTES
"""Largest number of bytes of an answer's head, together with the interim answers (1xx) before it."""
_REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    405: b"Method Not Allowed",
    413: b"Content Too Large",
    429: b"Too Many Requests",
}


class ClientConnection(asyncio.Protocol):
    """The connection of a client. Its requests are answered one at a time, in the order of their arrival."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._reader = RouteRequestReader(router.spec.max_body_bytes)
        self._started = 0.0
        self.request: RoutedRequest | None = None
        """The request that is being answered; None between two requests."""
        self._pending: RoutedRequest | None = None
        """A request whose head is complete and whose body is not."""
        self.server: ServerConnection | None = None
        """The connection to the server that answers `request`."""
        self.paused = False
        """Whether the client's write buffer is full: the client must read before the router writes more."""
        self._receiving = False
        """Whether `_timer` limits the time in which the client sends a request."""
        self._timer: asyncio.TimerHandle | None = None
        """The current time limit: for an idle connection, for sending a request, or for the first byte of the answer."""
        self._unread_timer: asyncio.TimerHandle | None = None
        """The time limit for a client that must read before the router writes more; None if `paused` is false."""

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
        """Pause or resume reading from the client.

        The router does not read while the client itself must read first, nor after `MOST_AHEAD_BYTES` of further requests.
        """
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
        """Take the next request from the received bytes. Once it is complete, answer it or send it to a server."""
        if self.paused or not self._reader:
            return
        try:
            if self._pending is None and (head := self._reader.take_head()) is not None:
                self._pending = head
                self._router.admit(head)  # A refused request is refused here, before its body takes memory.
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
            self._router.check(request)  # The router may have begun to stop while the body arrived.
        except RequestError as error:
            if self.request is None:
                # The request was not read to its end, so the connection is closed after the answer.
                self.request = self._pending or RoutedRequest()
                self._pending = None
                self.request.keeps_open = False
            self._refuse(error)
            return
        self._start_timer(self._router.spec.first_seconds, self._time_out)
        self.forward()

    def forward(self) -> None:
        """Send the request to a server that has not been tried for it. If there is none, refuse the request."""
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
        """Send the request again, after `instance` did not answer it.

        - `same`: whether to send it to the same server on a new connection; otherwise it goes to another server.
        - `lost`: whether the server was lost with the request. After the second loss the request is refused.
        """
        self.server = None
        if self.request is None:
            return
        self.request.losses += lost
        if self.request.losses > MOST_RETRIES_AFTER_LOSS:
            self._refuse(_lost())
            return
        if same:
            instance.close_idle()  # The server has closed an idle connection, so it may have closed the others too.
        else:
            self.request.tried.add(instance)
        self._router.retries += 1
        self.forward()

    @property
    def has_lost(self) -> bool:
        """Whether a server was lost while it had the request."""
        return self.request is not None and self.request.losses > 0

    def can_retry(self, instance: ServerInstance) -> bool:
        """Return whether there is a usable server, other than `instance`, that has not been tried for the request."""
        request = self.request
        usable = self._router.instances.usable
        return request is not None and any(other is not instance and other not in request.tried for other in usable)

    def begin_answer(self, status: int) -> None:
        """Count the answer and free the request's body. This is called before the first bytes of the answer go to the client.

        From then on the request is not sent to another server.
        """
        self._stop_timer()
        if self.request is not None:
            self.request.body = b""
        self._router.statuses[status] += 1
        self._router.first_byte.observe(self._loop.time() - self._started)

    def finish(self, *, keeps_open: bool) -> None:
        """End the request. If the connection stays open, begin the client's next request.

        The connection is closed unless both the caller (`keeps_open`) and the client want it open.
        """
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
        """Disconnect the client immediately, so that the server can take another request."""
        self.connection_lost(None)
        self.transport.abort()

    def _read_next(self) -> None:
        if self.request is None and not self.transport.is_closing():
            self._read_request()

    def break_off(self, *, between_chunks: bool) -> None:
        """End an answer after its server was lost, and close the connection to the client.

        `between_chunks` says whether the answer is a stream that was lost after a complete chunk. Then an error event is written first.
        """
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
        """Write an answer of the router itself."""
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
        """Return the request's id: the client's `x-request-id`, or else a new id of this router."""
        own = f"r{next(self._router.numbers)}"
        return own if self.request is None else self.request.id or own

    def _log(self, id: str, end: str) -> None:
        """Log the path of the request, and `end`, which says how the request has ended."""
        if self.request is not None:
            log.info("request %s: %s: %s", id, shown_path(self.request.path.decode("latin-1")), end)

    def _start_timer(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after `seconds`. This replaces the timer that was started before."""
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
    """A connection from the router to a server. It carries one request at a time."""

    transport: asyncio.Transport

    def __init__(self, instance: ServerInstance) -> None:
        self._instance = instance
        self._frames = ResponseFrames()
        self._client: ClientConnection | None = None
        self._request: RoutedRequest | None = None
        self._connected = self._used = self._begun = False
        self._first = b""
        """Bytes of the answer that are not passed on yet, because it is not decided whether the request goes to another server."""

    def start(self, client: ClientConnection, request: RoutedRequest) -> None:
        """Send a request to the server, and pass the answer on to `client`."""
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
            self._instance.healthy = False  # It is healthy again after the next successful health check.
            self.connection_lost(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connected = True
        if self._request is None or self._client is None:
            # The client has disconnected while this connection was being opened.
            self.transport.abort()
        else:
            self._send(self._client, self._request)

    def _send(self, client: ClientConnection, request: RoutedRequest) -> None:
        if client.paused:
            self.transport.pause_reading()
        self.transport.write(request.head + request.body)

    def pause(self) -> None:
        """Stop reading the answer. While the connection is still being opened, `_send` does this later (see `ClientConnection.paused`)."""
        if self._connected:
            self.transport.pause_reading()

    def resume(self) -> None:
        """Go on reading the answer."""
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
        """Pass the beginning of an answer on to the client, and return true.

        Returns false, and passes nothing on, if the head of the answer is incomplete, if more bytes are needed to find the error code, or
        if the request is sent to another server.
        """
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
            # A server may close an idle connection just when the router sends a request on it. So if a connection was used before, its loss
            # does not mean that the server is lost: the request is sent to the same server again.
            client.retry(self._instance, same=connected and used and self._instance.healthy, lost=connected)
        elif frames.ends_with_connection:
            client.finish(keeps_open=False)
        else:
            client.break_off(between_chunks=frames.between_chunks)

    def cancel(self) -> None:
        """Close the connection after the client has disconnected, so that the server stops the request."""
        self._release(keeps_open=False)

    def abort(self) -> None:
        """Close the connection as if the server were lost. Its request goes to another server, or its answer ends with an error."""
        if self._connected:
            self.transport.abort()

    def _release(self, *, keeps_open: bool) -> None:
        """Detach the connection from its client. Keep it for other requests, or close it.

        It is kept if `keeps_open`, if the server is healthy, and if there are fewer than `MOST_IDLE` such connections.
        """
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
    """Return the error for a request whose servers were lost twice, so that it is not sent again."""
    text = "the server was lost before its answer; the request may be the cause and is not sent again"
    return RequestError(503, text, code="server_lost", headers=[NO_RETRY])


_LOST = RequestError(503, "the server was lost; try again", code="server_lost")
"""The error event in a stream whose server was lost after the beginning of the answer."""
