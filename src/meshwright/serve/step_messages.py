"""Messages from rank 0 of a tensor-parallel engine to the other ranks: JSON, broadcast over Gloo."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MESSAGE_BYTES = 4096
"""Bytes of the first broadcast: the message's length, and as much of it as fits. A second broadcast has the rest, if any."""
LENGTH_BYTES = 8
"""Bytes of the length, little-endian."""
IDLE_LIMIT = timedelta(days=365)
"""How long the other ranks wait for a message. It is long because rank 0 may be idle; a rank that ends is noticed at once."""


class StepMessages:
    """A channel from rank 0 to all other ranks. All ranks create it together."""

    def __init__(self) -> None:
        group = dist.new_group(backend="gloo", timeout=IDLE_LIMIT)
        assert isinstance(group, dist.ProcessGroup), "the group has all ranks"
        self._group = group

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Rank 0 calls this, and each other rank calls `receive`."""
        data = json.dumps(message, separators=(",", ":")).encode()
        first = bytearray(MESSAGE_BYTES)
        first[:LENGTH_BYTES] = len(data).to_bytes(LENGTH_BYTES, "little")
        begin = data[: MESSAGE_BYTES - LENGTH_BYTES]
        first[LENGTH_BYTES : LENGTH_BYTES + len(begin)] = begin
        self._broadcast(first)
        if len(data) > len(begin):
            self._broadcast(bytearray(data[len(begin) :]))

    def receive(self) -> dict[str, Any]:
        """Wait for the next message of rank 0."""
        first = bytearray(MESSAGE_BYTES)
        self._broadcast(first)
        length = int.from_bytes(first[:LENGTH_BYTES], "little")
        data = first[LENGTH_BYTES : LENGTH_BYTES + length]
        if length > len(data):
            rest = bytearray(length - len(data))
            self._broadcast(rest)
            data += rest
        return json.loads(data)

    def acknowledge(self) -> None:
        """Tell rank 0 that the last message has been received. The other ranks call this."""
        dist.send(torch.zeros(1), 0, group=self._group)

    def wait_for_acknowledgement(self) -> None:
        """Wait until every other rank has called `acknowledge` or has ended. Rank 0 calls this before it closes.

        If rank 0 closed its connections right after its last message, Gloo could report an error to a rank instead of
        delivering the message.
        """
        for rank in range(1, dist.get_world_size(self._group)):
            with suppress(RuntimeError):
                dist.recv(torch.zeros(1), rank, group=self._group)

    def _broadcast(self, data: bytearray) -> None:
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._group)
