"""How the router reads HTTP requests: it checks the head and the length of the body, and passes both on almost unchanged.

A chunked body is passed on as a body with a content-length, so that router and server cannot disagree about its end. The header `expect` is
left out, because the router itself answers it.
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
"""Largest number of bytes of a request's head."""
MOST_HEADERS = 256
"""Largest number of headers of a request."""
_MOST_DIGITS = 19
"""Largest number of digits of a content-length. Servers might truncate or refuse a longer number."""
_LONGEST_LINE = 1024
"""Largest number of bytes of one framing line: a chunk's size, the end of a chunk, or a trailer."""
_MOST_FRAMING_BYTES = 64 << 10
"""All framing lines of a body together may have this many bytes more than the content of its chunks."""
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")


@dataclass(eq=False)
class RoutedRequest:
    """A client's request, and the servers that have been tried for it."""

    method: bytes = b""
    path: bytes = b""
    """Path without the query."""
    head: bytes = b""
    """The head as it is sent to servers, with the empty line at its end."""
    key: bytes = b""
    """The API key: from the header `authorization`, after `Bearer`, or else from `x-api-key`."""
    id: str | None = None
    """The client's `x-request-id`."""
    length: int = 0
    """The content-length; 0 for a chunked body."""
    body: bytes = b""
    """The body, after all of it has arrived."""
    chunks: ChunkedBody | None = None
    """Decoder of a chunked body that has not arrived completely; None for other bodies."""
    expects: bool = False
    """Whether the client waits for the answer 100 Continue before it sends the body."""
    keeps_open: bool = True
    """Whether the client may send another request on the same connection."""
    tried: set[Any] = field(default_factory=set)
    """Servers that did not answer the request."""
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
        """Number of received bytes that no request has taken yet."""
        return len(self._incoming)

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self._incoming += data

    def take_head(self) -> RoutedRequest | None:
        """Return the next request, without its body, or None if its head has not arrived completely.

        Raises RequestError if the head is too long, and the errors of `read_head`.
        """
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
        """If the body of a request has arrived completely, move it to `request.body` and return true; else return false.

        A chunked body then gets a content-length in `request.head`. Raises RequestError for malformed chunks.
        """
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
    """Decodes a chunked body of at most `most` bytes. Trailers are ignored."""

    def __init__(self, most: int) -> None:
        self.content = bytearray()
        """The decoded content so far."""
        self._most = most
        self._left = 0
        """Number of bytes of the current chunk that have not arrived yet."""
        self._framing = 0
        """Number of bytes of framing lines so far."""
        self._after_chunk = self._trailers = False
        """Whether the next line is the line break after a chunk; whether the next line is a trailer, or the empty line at the end."""

    def take(self, incoming: bytearray) -> bool:
        """Remove bytes of the body from the beginning of `incoming` and decode them. Returns whether the body has ended.

        Raises RequestError for malformed chunks, and for a body of more than `most` bytes.
        """
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
        """Read a framing line. Returns whether the body ends with it."""
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
    """Read the head of a request, given without the empty line at its end.

    Raises RequestError for a head that a server might understand in another way than the router, for a wrong content-length, and for a body
    that is longer than `most_body`.
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
    """Return the name of a header, in small letters, and its value.

    Raises RequestError for a malformed line. This includes a folded header: a line that continues the value of the line before it.
    """
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
