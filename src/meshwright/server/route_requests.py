"""Requests as a router reads them: the head is checked, and everything is passed on as it came."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshwright.server.errors import RequestError

MOST_HEAD_BYTES = 64 << 10
_MOST_DIGITS = 19
"""Digits of a content-length; servers may cut or refuse longer ones."""


@dataclass(eq=False)
class RoutedRequest:
    """Request of a client, with the servers that were tried for it."""

    method: bytes
    path: bytes
    head: bytes
    """Head of the request, with the empty line behind it."""
    key: bytes
    """Key in the header `authorization`, after `Bearer`."""
    length: int
    body: bytes = b""
    expects: bool = False
    """Whether the client waits for 100 Continue before it sends the body."""
    keeps_open: bool = True
    """Whether the client may send another request on the connection."""
    tried: set[Any] = field(default_factory=set)
    """Servers that could not answer it."""
    losses: int = 0
    """Connections that were lost after it was written to them."""


def read_head(data: bytes | bytearray, most_body: int) -> RoutedRequest | None:
    """The request whose head `data` begins with, without its body; None while the head is incomplete.

    Raises RequestError for a head that servers may understand differently, and for bodies of no or too great length.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) > MOST_HEAD_BYTES:
            raise RequestError(400, "the head is too long")
        return None
    lines = bytes(data[:end]).split(b"\r\n")
    if any(character in line for line in lines for character in (b"\n", b"\r", b"\0")):
        raise RequestError(400, "a line of the head is wrong")
    words = lines[0].split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0") or not words[1].startswith(b"/"):
        raise RequestError(400, "expected a request of HTTP/1.1")
    request = RoutedRequest(words[0], words[1].partition(b"?")[0], b"", b"", 0, keeps_open=words[2] == b"HTTP/1.1")
    kept, lengths = [lines[0]], []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise RequestError(400, "a header is wrong")
        name, value = name.lower(), value.strip()
        if name == b"expect":
            request.expects = value.lower() == b"100-continue"
            continue
        if name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            raise RequestError(411, "expected a content-length")
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            request.key = key.strip() if scheme.lower() == b"bearer" else b""
        elif name == b"connection":
            request.keeps_open = request.keeps_open and value.lower() != b"close"
        kept.append(line)
    if len(lengths) > 1 or any(not length.isdigit() or len(length) > _MOST_DIGITS for length in lengths):
        raise RequestError(400, "content-length: expected one number")
    request.length = int(lengths[0]) if lengths else 0
    if request.length > most_body:
        raise RequestError(413, f"the body is longer than {most_body} bytes")
    request.head = b"\r\n".join(kept) + b"\r\n\r\n"
    return request
