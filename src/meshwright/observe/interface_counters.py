"""Bytes sent through a network interface, as counted by the kernel (Linux)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

COUNTERS = Path("/proc/net/dev")
"""File with one line per interface: name, eight receive counters and eight send counters; bytes are the first of each."""
SENT_BYTES_COLUMN = 8
"""Index of the sent bytes among the counters of a line."""


@dataclass(frozen=True)
class Traffic:
    """Counts bytes that `interface` sends from now on.

    On loopback the count has all bytes over sockets between processes of the host, each byte once: NCCL
    messages of emulated nodes, other use of loopback on the host (Gloo, stores, other programs) and TCP headers.
    """

    interface: str
    sent_before: int

    @classmethod
    def start(cls, interface: str = "lo") -> Traffic | None:
        """Start a count; None if the kernel has no counter of that name."""
        sent = sent_bytes(interface)
        return None if sent is None else cls(interface, sent)

    def bytes(self) -> int:
        """Bytes sent since the start; 0 if the interface no longer exists."""
        return max(0, (sent_bytes(self.interface) or 0) - self.sent_before)


def sent_bytes(interface: str, counters: Path = COUNTERS) -> int | None:
    """Bytes that the interface has sent since it came up, or None if it does not exist."""
    try:
        lines = counters.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            return int(numbers.split()[SENT_BYTES_COLUMN])
    return None
