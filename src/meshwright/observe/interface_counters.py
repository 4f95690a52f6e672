"""Counts the bytes that this host sends through a network interface, from the kernel's counters (Linux)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

COUNTERS = Path("/proc/net/dev")
"""File with one line for each interface: its name, eight receive counters and eight send counters.

The first counter of each eight counts bytes.
"""
SENT_BYTES_COLUMN = 8
"""Index of the sent bytes among the 16 counters of a line."""


@dataclass(frozen=True)
class Traffic:
    """Counts the bytes that `interface` sends from now on.

    On loopback, these are all bytes that processes of this host send each other over sockets, each byte once. They
    include NCCL's messages between emulated nodes, all other use of loopback (Gloo, stores, other programs) and TCP
    headers.
    """

    interface: str
    sent_before: int

    @classmethod
    def start(cls, interface: str = "lo") -> Traffic | None:
        """Start counting; return None if the interface does not exist."""
        sent = sent_bytes(interface)
        return None if sent is None else cls(interface, sent)

    def bytes(self) -> int:
        """Return the bytes sent since the start; 0 if the interface no longer exists."""
        return max(0, (sent_bytes(self.interface) or 0) - self.sent_before)


def sent_bytes(interface: str, counters: Path = COUNTERS) -> int | None:
    """Return the bytes that the interface has sent since it came up; None if it does not exist.

    `counters` is the file with the counters of all interfaces.
    """
    try:
        lines = counters.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            return int(numbers.split()[SENT_BYTES_COLUMN])
    return None
