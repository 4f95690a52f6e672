"""Messages between the HTTP process and a text process, over a Unix socket pair.

A message is a JSON object and a payload of bytes, which may be empty.

First the HTTP process sends `{setup, files}`: a `Setup`, and the result of `ModelFiles.pack`, whose bytes are the
payload. The text process answers with an empty message when it has loaded them.

Then the HTTP process sends jobs `{work, context, vocab}`, each with a request body as payload. The text process answers
them in the same order, with one of:

- `{"request": …}`, with token ids as payload: the result of `CheckedTextRequest.pack`
- `{"error": {status, message, param, code}}`: a `RequestError`
- `{}`, with a whole answer as payload
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

_SIZES = struct.Struct("!IQ")
"""Beginning of a message: the number of bytes of the JSON, and of the payload."""


class TextFrame(NamedTuple):
    """A message with its payload."""

    message: dict[str, Any]
    payload: memoryview


def frame_head(message: Mapping[str, Any], payload_bytes: int = 0) -> bytes:
    """Return the beginning of a message. The caller sends its `payload_bytes` bytes of payload afterwards."""
    content = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _SIZES.pack(len(content), payload_bytes) + content


class TextFrameReader:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> list[TextFrame]:
        """Add received bytes and return the messages that are now complete."""
        self._bytes += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> TextFrame | None:
        """Remove the first message from the received bytes and return it; None if it is incomplete.

        The payload is a view, not a copy, because it may be as long as a request body.
        """
        content = self._bytes
        if len(content) < _SIZES.size:
            return None
        length, payload_bytes = _SIZES.unpack_from(content)
        middle = _SIZES.size + length
        end = middle + payload_bytes
        if len(content) < end:
            return None
        self._bytes = content[end:]
        return TextFrame(json.loads(content[_SIZES.size : middle]), memoryview(content)[middle:end])
