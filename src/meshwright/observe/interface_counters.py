"""Bytes through a network interface between two moments, as the kernel counts them (Linux)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

COUNTERS = Path("/proc/net/dev")
"""One line an interface: name, then eight counters of what was received and eight of what was sent; bytes come first in both."""
FIRST_OF_SENT = 8


@dataclass(frozen=True)
class Traffic:
    """What `interface` sends from now on.

    On loopback, which receives what it sends, that is every byte between ranks of one host that goes over sockets, once: emulated nodes'
    NCCL messages, and with them whatever else uses loopback on the host (Gloo, stores, other programs) and TCP's headers.
    """

    interface: str
    sent_before: int

    @classmethod
    def start(cls, interface: str = "lo") -> Traffic | None:
        """Begin to count; None where the kernel counts nothing of that name."""
        sent = sent_bytes(interface)
        return None if sent is None else cls(interface, sent)

    def bytes(self) -> int:
        """Bytes sent since the start; 0 when the interface is gone."""
        return max(0, (sent_bytes(self.interface) or 0) - self.sent_before)


def sent_bytes(interface: str, counters: Path = COUNTERS) -> int | None:
    """Bytes the interface has sent since it came up, or None when it is not there."""
    try:
        lines = counters.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, colon, numbers = line.partition(":")
        if colon and name.strip() == interface:
            return int(numbers.split()[FIRST_OF_SENT])
    return None
