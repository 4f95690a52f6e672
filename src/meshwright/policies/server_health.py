"""Decides from regular checks whether a server gets new requests, and when its unfinished requests are given up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HealthAnswer = Literal["ready", "refusing", "missed"]
"""Result of a check. ready: the server takes requests. refusing: it takes none for now. missed: it gave no valid answer."""
FEWEST_MISSED = 2
"""A server must miss at least this many successive checks before its requests are given up."""


@dataclass(frozen=True)
class ServerHealth:
    """State of a server after its checks so far."""

    ready: bool = False
    """Whether the server gets new requests."""
    missed: int = 0
    """Number of successive checks that it has missed."""
    lost: bool = False
    """Whether its unfinished requests are given up."""


def health_after(
    health: ServerHealth, answer: HealthAnswer, quiet_seconds: float, silent_seconds: float
) -> ServerHealth:
    """The health of a server after one more check.

    `quiet_seconds` is the time since its last byte on any connection. A server that still sends bytes is busy and not dead. Its requests
    continue, however many checks it misses.
    """
    if answer != "missed":
        return ServerHealth(ready=answer == "ready")
    missed = health.missed + 1
    return ServerHealth(missed=missed, lost=missed >= FEWEST_MISSED and quiet_seconds >= silent_seconds)
