"""Transfers between instances: each instance has one port out and one in, which carry one transfer after another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Port:
    """Direction of an instance's connection."""

    bytes_per_second: float
    free: float = 0.0
    """Time when the last transfer ends."""


def transfer(sender: Port, receiver: Port, now: float, size: float, latency_seconds: float) -> float:
    """Return the time when `size` bytes that are ready at `now` have arrived.

    Both ports are taken until then, at the slower one's rate.

    A latency delays a transfer, but not the next one.

    The second transfer of 10 bytes waits for the first, at the slower port's 5 bytes a second:

    >>> sender = Port(10.0)
    >>> receiver = Port(5.0)
    >>> transfer(sender, receiver, 0.0, 10, 0.1), transfer(sender, receiver, 1.0, 10, 0.1)
    (2.1, 4.1)
    """
    begin = max(now, sender.free, receiver.free)
    end = begin + size / min(sender.bytes_per_second, receiver.bytes_per_second)
    sender.free = receiver.free = end
    return end + latency_seconds
