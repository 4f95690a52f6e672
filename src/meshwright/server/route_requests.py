"""Requests as a router reads them: it checks the head and the length, and passes the bytes on unchanged.

Only a body in chunks is changed: it is passed on as a body of known length, so that router and server cannot disagree about its end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.connections.limits import ROUTE
from meshwright.server.errors import RequestError
from meshwright.server.replies import kept_request_id

MOST_HEAD_BYTES = ROUTE.head_bytes
MOST_HEADERS = 256
_MOST_DIGITS = 19
"""Most digits of a content-length; servers may cut or refuse longer ones."""
_LONGEST_LINE = 1024
"""Most bytes of a line between chunks, or after them."""
_MOST_FRAMING_BYTES = 64 << 10
"""Most bytes of such lines, in addition to as many bytes as the chunks have."""
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")


@dataclass(eq=False)
class RoutedRequest:
    """A client's request, and the servers that have been tried for it."""

    method: bytes = b""
    path: bytes = b""
    head: bytes = b""
    """Head of the request, with the empty line after it."""
    key: bytes = b""
    """Key in the header `authorization`, after `Bearer`, or else in `x-api-key`."""
    id: str | None = None
    """The client's `x-request-id`."""
    length: int = 0
    body: bytes = b""
    chunks: ChunkedBody | None = None
    """The body as it comes in chunks; None if its length is known."""
    expects: bool = False
    """Whether the client waits for 100 Continue before it sends the body."""
    keeps_open: bool = True
    """Whether the client may send another request on the connection."""
    tried: set[Any] = field(default_factory=set)
    """Servers that could not answer it."""
    losses: int = 0
    """Number of connections that were lost after the request was written to them."""


class RouteRequestReader:
    """Reads the requests of one connection, one after the other."""

    def __init__(self, most_body: int) -> None:
        self._most_body = most_body
        self._incoming = bytearray()
        self._searched = 0
        """Number of received bytes that have been searched for the end of a head."""

    def __len__(self) -> int:
        """Number of received bytes that are not taken as requests yet."""
        return len(self._incoming)

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self._incoming += data

    def take_head(self) -> RoutedRequest | None:
        """The next request, without its body; None while its head is incomplete. Raises RequestError like `read_head`."""
        end = self._incoming.find(b"\r\n\r\n", max(self._searched - 3, 0), MOST_HEAD_BYTES)
        if end < 0:
            self._searched = len(self._incoming)
            if self._searched >= MOST_HEAD_BYTES:
                raise RequestError(400, "the head is too long")
            return None
        head = bytes(memoryview(self._incoming)[:end])
        del self._incoming[: end + 4]
        self._searched = 0
        return read_head(head, self._most_body)

    def take_body(self, request: RoutedRequest) -> bool:
        """Whether the body of the request has come; then it is in `request.body`. Raises RequestError for wrong chunks."""
        if request.chunks is not None:
            if not request.chunks.take(self._incoming):
                return False
            request.body = bytes(request.chunks.content)
            request.chunks = None
            request.head = request.head[:-2] + b"content-length: %d\r\n\r\n" % len(request.body)
            return True
        if len(self._incoming) < request.length:
            return False
        request.body = bytes(memoryview(self._incoming)[: request.length])
        del self._incoming[: request.length]
        return True


class ChunkedBody:
    """Decodes a body that comes in chunks; trailers are left out."""

    def __init__(self, most: int) -> None:
        self.content = bytearray()
        self._most = most
        self._left = 0
        """Bytes of the chunk that are still to come."""
        self._framing = 0
        """Bytes of lines so far."""
        self._after_chunk = self._trailers = False
        """Whether the next line is the end of a chunk, or one of the trailers."""

    def take(self, incoming: bytearray) -> bool:
        """Take bytes of the body from the beginning of `incoming`; whether it has ended. Raises RequestError for wrong ones."""
        position = 0
        ended = False
        while not ended:
            if self._left:
                piece = incoming[position : position + self._left]
                self.content += piece
                position += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
            end = incoming.find(b"\r\n", position, position + _LONGEST_LINE)
            if end < 0:
                if len(incoming) - position >= _LONGEST_LINE:
                    raise RequestError(400, "a line between the chunks of the body is too long")
                break
            ended = self._take_line(bytes(incoming[position:end]))
            position = end + 2
        del incoming[:position]
        return ended

    def _take_line(self, line: bytes) -> bool:
        """Whether the body ends with the line."""
        self._framing += len(line) + 2
        if self._framing > _MOST_FRAMING_BYTES + len(self.content):
            raise RequestError(400, "the chunks of the body are too small")
        if self._trailers:
            if line:
                _split_header(line)
            return not line
        if self._after_chunk:
            if line:
                raise RequestError(400, "a chunk of the body is longer than announced")
            self._after_chunk = False
            return False
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise RequestError(400, "a chunk of the body has no size")
        self._left = int(match[1], 16)
        if len(self.content) + self._left > self._most:
            raise _too_long(self._most)
        self._after_chunk = self._left > 0
        self._trailers = self._left == 0
        return False


def read_head(head: bytes, most_body: int) -> RoutedRequest:
    """The request with a head, which is given without the empty line behind it.

    Raises RequestError for a head that servers may understand differently, and for bodies of no or too great length.
    """
    lines = head.split(b"\r\n")
    if b"\0" in head or not len(lines) - 1 == head.count(b"\r") == head.count(b"\n"):
        raise RequestError(400, "a line of the head is wrong")
    if len(lines) > MOST_HEADERS + 1:
        raise RequestError(400, f"the head has more than {MOST_HEADERS} headers")
    words = lines[0].split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0") or not words[1].startswith(b"/"):
        raise RequestError(400, "expected a request of HTTP/1.1")
    request = RoutedRequest(words[0], words[1].partition(b"?")[0], keeps_open=words[2] == b"HTTP/1.1")
    kept = [lines[0]]
    lengths = []
    codings = []
    for line in lines[1:]:
        name, value = _split_header(line)
        if name == b"expect":
            request.expects = value.lower() == b"100-continue"
            continue
        if name == b"transfer-encoding":
            codings.append(value.lower())
            continue
        if name == b"content-length":
            lengths.append(value)
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            request.key = key.strip() if scheme.lower() == b"bearer" else b""
        elif name == b"x-api-key":
            request.key = request.key or value
        elif name == b"x-request-id":
            request.id = kept_request_id(value)
        elif name == b"connection":
            request.keeps_open = request.keeps_open and value.lower() != b"close"
        kept.append(line)
    if codings:
        if codings != [b"chunked"] or lengths or words[2] == b"HTTP/1.0":
            raise RequestError(400, "transfer-encoding: expected chunked, alone, and no content-length beside it")
        request.chunks = ChunkedBody(most_body)
    request.length = _length(lengths, most_body)
    request.head = b"\r\n".join(kept) + b"\r\n\r\n"
    return request


def _split_header(line: bytes) -> tuple[bytes, bytes]:
    """Name in small letters, and value; a line that goes on with the value of the one before has none, and is refused."""
    name, colon, value = line.partition(b":")
    if not colon or not name or name != name.strip() or b"\r" in value or b"\n" in value:
        raise RequestError(400, "a header is wrong")
    return name.lower(), value.strip(b" \t")


def _length(values: Sequence[bytes], most: int) -> int:
    if len(values) > 1 or any(not value.isdigit() or len(value) > _MOST_DIGITS for value in values):
        raise RequestError(400, "content-length: expected one number")
    length = int(values[0]) if values else 0
    if length > most:
        raise _too_long(most)
    return length


def _too_long(most: int) -> RequestError:
    return RequestError(413, f"the body is longer than {most} bytes")
