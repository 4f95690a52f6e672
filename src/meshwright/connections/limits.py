"""Limits of everything that listens, in one table, and the limit of open files."""

from __future__ import annotations

import resource
from dataclasses import dataclass

MOST_FILES = 1 << 16
"""Open files to which the soft limit is raised, if the hard limit allows it."""


@dataclass(frozen=True, kw_only=True)
class ListenerLimits:
    """Limits of one listener; those of bytes and seconds hold before a client has shown any key."""

    connections: int
    """Most connections at a time."""
    files: float
    """Most connections, as a share of the files that the process may open."""
    head_bytes: int = 64 << 10
    """Longest head of a request, or first message."""
    head_seconds: float = 30.0
    """Longest time from the beginning of a head or body to its end; of those that show a key, to the key."""
    idle_seconds: float = 75.0
    """Longest time without a request, and without reading an answer that is being sent."""

    @property
    def most(self) -> int:
        """Connections that the listener takes now."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        known = files if 0 <= files < MOST_FILES else MOST_FILES
        return max(1, min(self.connections, int(known * self.files)))


SERVE = ListenerLimits(connections=1 << 14, files=1 / 2)
ADMIN = ListenerLimits(connections=64, files=1 / 16)
ROUTE = ListenerLimits(connections=1 << 14, files=1 / 4)
"""Each client of a router has a connection to a server too."""
COORDINATOR = ListenerLimits(connections=8192, files=1 / 2, head_bytes=8 << 10, head_seconds=10.0, idle_seconds=60.0)
METRICS = ListenerLimits(connections=16, files=1 / 8, head_bytes=8 << 10, head_seconds=10.0, idle_seconds=10.0)
SNAPSHOTS = ListenerLimits(connections=512, files=1 / 4, head_bytes=8 << 10, head_seconds=10.0, idle_seconds=120.0)
TRANSFERS = ListenerLimits(connections=256, files=1 / 4, head_bytes=4 << 10, head_seconds=5.0, idle_seconds=30.0)
"""Of engines, for other engines; and of `meshwright cache`. Those that have shown the key may be silent."""


def raise_file_limit() -> None:
    """Raise the soft limit of open files as far as the hard limit allows, at most to `MOST_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
