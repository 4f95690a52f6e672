"""Messages from the first rank of a tensor-parallel engine to the others: JSON in bytes over Gloo."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MESSAGE_BYTES = 4096
"""Bytes that are always sent: the length of the message and its beginning. The rest of a longer one follows."""
LENGTH_BYTES = 8
IDLE_LIMIT = timedelta(days=365)
"""How long the others wait for a message: the first rank may have nothing to do. A rank that ends is noticed at once."""


class StepMessages:
    """A channel from rank 0 to all other ranks of the job. Creating it is collective."""

    def __init__(self) -> None:
        group = dist.new_group(backend="gloo", timeout=IDLE_LIMIT)
        assert isinstance(group, dist.ProcessGroup), "the group has all ranks"
        self._group = group

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; rank 0 calls this when the others call `receive`."""
        data = json.dumps(message, separators=(",", ":")).encode()
        first = bytearray(MESSAGE_BYTES)
        first[:LENGTH_BYTES] = len(data).to_bytes(LENGTH_BYTES, "little")
        begin = data[: MESSAGE_BYTES - LENGTH_BYTES]
        first[LENGTH_BYTES : LENGTH_BYTES + len(begin)] = begin
        self._broadcast(first)
        if len(data) > len(begin):
            self._broadcast(bytearray(data[len(begin) :]))

    def receive(self) -> dict[str, Any]:
        """Wait for the next message."""
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
        """Acknowledge the last message to rank 0; for the other ranks."""
        dist.send(torch.zeros(1), 0, group=self._group)

    def wait_for_acknowledgement(self) -> None:
        """Wait until all other ranks have called `acknowledge` or are gone; for rank 0.

        If rank 0 closed its connections at once, Gloo could report that to a rank in place of the last message.
        """
        for rank in range(1, dist.get_world_size(self._group)):
            with suppress(RuntimeError):
                dist.recv(torch.zeros(1), rank, group=self._group)

    def _broadcast(self, data: bytearray) -> None:
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._group)
