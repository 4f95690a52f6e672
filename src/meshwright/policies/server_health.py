"""Decides from the checks of a server whether it gets new requests, and when those that it has are given up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HealthAnswer = Literal["ready", "refusing", "missed"]
"""Answer to a check: takes requests, takes none for now, or no answer of that form."""
FEWEST_MISSED = 2
"""Missed checks in turn before the requests of a server may be given up."""


@dataclass(frozen=True)
class ServerHealth:
    """Result of the checks of a server so far."""

    ready: bool = False
    """Whether it gets new requests."""
    missed: int = 0
    """Checks that it has missed in turn."""
    lost: bool = False
    """Whether the requests that it has are given up."""


def health_after(
    health: ServerHealth, answer: HealthAnswer, quiet_seconds: float, silent_seconds: float
) -> ServerHealth:
    """Return the health of a server after one more check.

    `quiet_seconds` have passed since its last byte on any connection. A server that sends bytes is busy, not dead: its
    requests go on, however many checks it misses.
    """
    if answer != "missed":
        return ServerHealth(ready=answer == "ready")
    missed = health.missed + 1
    return ServerHealth(missed=missed, lost=missed >= FEWEST_MISSED and quiet_seconds >= silent_seconds)
