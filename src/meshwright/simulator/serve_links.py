"""Transfers of cache blocks between instances. Each instance can send one transfer and receive one transfer at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Port:
    """The sending or the receiving side of an instance's network connection."""

    bytes_per_second: float
    free: float = 0.0
    """Time in seconds from which the next transfer may begin."""


def transfer(sender: Port, receiver: Port, now: float, size: float, latency_seconds: float) -> float:
    """Return the time in seconds when `size` bytes have arrived that the sender can send from `now` on.

    The transfer begins when both ports are free, and has the rate of the slower port. Both ports are busy until its last byte is sent.
    The latency is added to the arrival, but the next transfer does not wait for it.

    Two transfers of 10 bytes at 5 bytes a second: the first takes 0 … 2 s, the second waits for it and takes 2 … 4 s:

    >>> sender = Port(10.0)
    >>> receiver = Port(5.0)
    >>> transfer(sender, receiver, 0.0, 10, 0.1), transfer(sender, receiver, 1.0, 10, 0.1)
    (2.1, 4.1)
    """
    begin = max(now, sender.free, receiver.free)
    end = begin + size / min(sender.bytes_per_second, receiver.bytes_per_second)
    sender.free = receiver.free = end
    return end + latency_seconds
