"""Messages between the HTTP process and the engine's process, over a Unix socket pair.

A message is its length (4 bytes, big-endian) and then a JSON object. The HTTP process sends one of these keys:

- `submit`: requests with one prompt: `{ids, tokens, new_tokens, sampling, stop_ids, grammar, priority, salt}`; `tokens`
  is encoded as in `packed_ids.py`
- `abort`: ids of requests that the engine ends
- `pause`: true stops the engine's steps, false lets them go on
- `load`: the folder with newer weights
- `role`: new role of the engine

The engine's process sends one of these keys:

- `ready`: context, vocabulary and sizes, once the model is loaded
- `step`: after a step, `[id, tokens]` or `[id, tokens, details]` for each request with news, and `figures`, the fields
  of `EngineFigures`. `details` is an object with the keys of `DETAILS` that have a value. It may also have
  `prompt_logprobs`, packed by `PromptLogprobs.packed`, and from a reward model `score`
- `transfers`: the fields of `TransferFigures`, when they have changed
- `refused`: ids of requests that could not be queued. `error` is the reason; `code` is a key of `errors.FAILURES`, or
  none if a value of the request was wrong
- `loaded`: the answer to `load`; `error` is none if loading succeeded
- `failed`: why the engine cannot continue; `code` is the exit code of the server
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
"""Details of a step's news, with their JSON types. They are fields of `News`.

Engines also exchange these: an engine that computes a prompt for another one sends the first tokens with their details.
"""
_LENGTH = struct.Struct("!I")
"""The length before each message: an unsigned integer of 4 bytes, big-endian."""
MOST_BYTES = 256 << 20
"""Maximum number of bytes of one message."""


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as bytes. Raises ValueError if it is too long or has NaN or infinity, which JSON does not have."""
    content = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(content) > MOST_BYTES:
        raise ValueError(f"a message of {len(content)} bytes; expected at most {MOST_BYTES}")
    return _LENGTH.pack(len(content)) + content


class ServerMessageReader:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> list[dict[str, Any]]:
        """Add received bytes and return the messages that are now complete.

        Raises ValueError for a length that is too large.
        """
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
