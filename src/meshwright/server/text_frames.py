"""Messages between the HTTP process and a text process: JSON, and bytes beside it, over a Unix socket pair.

To the text process goes first `{setup, files}`, a `Setup` and `ModelFiles.pack`; it answers with an empty message once it has loaded them.
Then come jobs: `{work, context, vocab}` beside a body. The answers, in the same order:

- `{"request": …}` and token ids: `TextRequest.pack`
- `{"error": {status, message, param, code}}`: a `RequestError`
- `{}` beside the bytes of a whole answer
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

_SIZES = struct.Struct("!IQ")
"""Bytes of the JSON, and bytes beside it."""


class TextFrame(NamedTuple):
    """Message with the bytes beside it."""

    message: dict[str, Any]
    payload: memoryview


def frame_head(message: Mapping[str, Any], payload_bytes: int = 0) -> bytes:
    """The bytes of a message; `payload_bytes` follow it."""
    content = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _SIZES.pack(len(content), payload_bytes) + content


class TextFrameReader:
    """Splits bytes as they arrive into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> list[TextFrame]:
        """The messages that these bytes complete."""
        self._bytes += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> TextFrame | None:
        """The first message, taken out of the bytes; its payload is not copied, since it may be as long as a body."""
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
