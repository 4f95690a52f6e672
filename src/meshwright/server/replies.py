"""Answers that are sent as one body, and reading the bodies of requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.server.errors import RequestError, content_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive

JSON_HEADERS = [(b"content-type", b"application/json")]
PIECE_BYTES = 1 << 20
"""Maximum number of bytes of an answer that are sent before the event loop gets a turn."""
BODY_SECONDS = 30.0
"""Seconds that a client has to send a body."""


MOST_ID_BYTES = 128
"""Maximum number of bytes of a client's request id."""
_REQUEST_ID = re.compile(rb"[!-~]{1,%d}" % MOST_ID_BYTES)
"""A request id that is safe to log: visible ASCII characters."""


class ContentResponse:
    """ASGI application that sends one answer with known content."""

    def __init__(self, status: int, content: bytes | memoryview, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.status = status
        self.content = content
        self.headers = [*headers, (b"content-length", str(len(content)).encode("ascii"))]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        content = self.content
        while len(content) > PIECE_BYTES:
            await send({"type": "http.response.body", "body": bytes(content[:PIECE_BYTES]), "more_body": True})
            content = memoryview(content)[PIECE_BYTES:]
            await asyncio.sleep(0)  # let the event loop serve other requests
        await send({"type": "http.response.body", "body": bytes(content)})


def json_response(value: Mapping[str, Any], status: int = 200) -> ContentResponse:
    """Return an answer with a JSON object."""
    return ContentResponse(status, json.dumps(value, allow_nan=False).encode("ascii"), JSON_HEADERS)


def error_response(error: RequestError, path: str) -> ContentResponse:
    """Return an error as an answer, in the format of the API to which `path` belongs."""
    return ContentResponse(error.status, content_of(error, path), [*JSON_HEADERS, *error.headers])


def kept_request_id(value: bytes) -> str | None:
    """Return a client's `x-request-id` if it is safe to log: 1 to 128 visible ASCII characters. Return None otherwise."""
    return value.decode("ascii") if _REQUEST_ID.fullmatch(value) else None


def shown_path(path: str) -> str:
    """Return a client's path as the log shows it: escaped, and at most 100 characters."""
    return path.encode("unicode_escape").decode("ascii")[:100]


async def client_left(receive: Receive) -> None:
    """Wait until the client closes the connection. Call it after the request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, most: int) -> bytes:
    """Read the body of a request, at most `most` bytes.

    Raises RequestError if it is longer, takes longer than `BODY_SECONDS`, or its content type is not application/json.
    A browser lets pages of other sites send other content types without asking the server first; that is why they are
    refused.
    """
    from starlette.requests import ClientDisconnect

    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(400, "content-type: expected application/json")
    too_long = RequestError(413, f"the body is longer than {most} bytes")
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdecimal() or int(length[:20]) > most:
        raise too_long
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                content += chunk
                if len(content) > most:
                    raise too_long
    except TimeoutError:
        raise RequestError(400, f"the body has not arrived within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise RequestError(400, "the client has closed the connection") from None
    return bytes(content)
