"""Messages between the HTTP process and the engine's process: JSON behind its length, over a Unix socket pair.

To the engine, each message has one of these keys:

- `submit`: requests with one prompt: `{ids, tokens, new_tokens, sampling, stop_ids, grammar, priority, salt}`,
  `tokens` as in `packed_ids.py`
- `abort`: ids of requests
- `pause`: whether steps stop
- `load`: the folder with newer weights
- `role`: new role of the engine

From the engine:

- `ready`: context, vocabulary and sizes, once the model is loaded
- `step`: `[id, tokens]` or `[id, tokens, details]` for each request with news; `figures` as `EngineFigures`. `details` has those keys of
  `DETAILS` that have a value, and `prompt_logprobs` as `PromptLogprobs.packed`
- `transfers`: `TransferFigures`, when they have changed
- `refused`: ids of requests that could not be queued; `error` is the reason, `code` one of `errors.FAILURES`, or none for a wrong value
- `loaded`: the answer to `load`; `error` is none if it succeeded
- `failed`: why the engine cannot continue; `code` is an exit code
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

DETAILS: Mapping[str, type] = {
    "reason": str,
    "error": str,
    "code": str,
    "logprobs": list,
    "stop_token": int,
    "cached_tokens": int,
}
"""Details of an update beside its tokens that other engines also send, with the types of JSON; fields of `News`."""
_LENGTH = struct.Struct("!I")
MOST_BYTES = 256 << 20
"""Longest message."""


def encode(message: dict[str, Any]) -> bytes:
    """The bytes of a message. Raises ValueError if it is too long, or has a number that JSON does not have."""
    content = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(content) > MOST_BYTES:
        raise ValueError(f"a message of {len(content)} bytes; expected at most {MOST_BYTES}")
    return _LENGTH.pack(len(content)) + content


class ServerMessageReader:
    """Splits bytes as they arrive into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that these bytes complete. Raises ValueError for a length that no message has."""
        waiting = self._bytes
        start = 0
        messages = []
        waiting += data
        while len(waiting) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(waiting, start)
            if length > MOST_BYTES:
                raise ValueError(f"a message of {length} bytes; expected at most {MOST_BYTES}")
            end = start + _LENGTH.size + length
            if len(waiting) < end:
                break
            messages.append(json.loads(waiting[start + _LENGTH.size : end]))
            start = end
        del waiting[:start]
        return messages
