"""Limits of all listeners in one place, and the limit of open files."""

from __future__ import annotations

import resource
from dataclasses import dataclass

MOST_FILES = 1 << 16
"""The soft limit of open files is raised to this number, if the hard limit allows it."""


@dataclass(frozen=True, kw_only=True)
class ListenerLimits:
    """Limits of one listener. The limits of bytes and seconds apply before a client has shown any key."""

    connections: int
    """Most connections at a time."""
    files: float
    """Most connections, as a share of the files that the process may open."""
    head_bytes: int = 64 << 10
    """Most bytes of the head of a request, or of a first message."""
    head_seconds: float = 30.0
    """Seconds from the beginning of a head or body to its end.

    For a client that must show a key: until it has shown the key.
    """
    idle_seconds: float = 75.0
    """Seconds without a request, and seconds for which a client may leave an answer unread."""

    @property
    def most(self) -> int:
        """Most connections that the listener accepts at present, given the limit of open files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        known = files if 0 <= files < MOST_FILES else MOST_FILES
        return max(1, min(self.connections, int(known * self.files)))


SERVE = ListenerLimits(connections=1 << 14, files=1 / 2)
"""For the API of a server."""
ADMIN = ListenerLimits(connections=64, files=1 / 16)
"""For the admin port of a server."""
ROUTE = ListenerLimits(connections=1 << 14, files=1 / 4)
"""For a router. A client needs two files: its own connection, and a connection to a server. So the share is half of SERVE's."""
COORDINATOR = ListenerLimits(connections=8192, files=1 / 2, head_bytes=8 << 10, head_seconds=10.0, idle_seconds=60.0)
"""For the coordinator of a job, whose clients are agents."""
METRICS = ListenerLimits(connections=16, files=1 / 8, head_bytes=8 << 10, head_seconds=10.0, idle_seconds=10.0)
"""For the metrics of a run."""
SNAPSHOTS = ListenerLimits(connections=512, files=1 / 4, head_bytes=8 << 10, head_seconds=10.0, idle_seconds=120.0)
"""For the snapshots of a host, whose clients are other hosts."""
TRANSFERS = ListenerLimits(connections=256, files=1 / 4, head_bytes=4 << 10, head_seconds=5.0, idle_seconds=30.0)
"""For engines that exchange blocks, and for `meshwright cache`. A client that has shown the key may be silent for longer."""


def raise_file_limit() -> None:
    """Raise the soft limit of open files as far as the hard limit allows, but at most to `MOST_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
