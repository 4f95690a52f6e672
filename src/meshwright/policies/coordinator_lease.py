"""When a process may coordinate a job, and when another one may take its place. Pure: times are given by the callers.

The lease is a small record that all hosts can reach. It changes by compare-and-swap only: a write succeeds if the record is
still the version that the writer has read. The holder renews it every `RENEW_SECONDS`, and acts for `ACTING_SECONDS`, counted
from before the write of its last renewal. Another process takes it when it has seen the same version for `LEASE_SECONDS`,
counted from after that write. So the holder stops first, unless the other clock runs 6 / 4.5, a third, faster. No process
compares its time with another host's.
"""

from __future__ import annotations

from dataclasses import dataclass

RENEW_SECONDS = 1.0
ACTING_SECONDS = 4.5
LEASE_SECONDS = 6.0
CONTEND_SECONDS = 2.5
"""Seconds without a renewal after which an agent starts a process that waits for the lease: it loads its program meanwhile."""


@dataclass(frozen=True)
class CoordinatorLease:
    """Content of the register."""

    version: int
    """Grows by one with each replacement."""
    holder: str
    """Random id of the holding process."""
    process: str
    """Readable name of the holding process, as in lock files (`durable.lock.this_process`)."""
    host: str
    """Name of its machine: the first part of the names of its agents."""
    address: str
    """HOST:PORT at which agents reach it."""
    released: bool = False
    """Whether the holder has ended by itself."""

    @property
    def pid(self) -> int:
        """Process id of the holder, on its machine."""
        return int(self.process.split()[1])


class LeaseWatch:
    """What one process has seen of the lease. Its times are seconds of a clock of this host that never goes back."""

    def __init__(self, version: int | None = None, since: float = 0.0) -> None:
        """Continue the watch of another process of this host, which has seen `version` since the time `since`."""
        self.lease: CoordinatorLease | None = None
        self.version = version
        self.since = since
        self.renewed = False
        """Whether the lease was renewed while it was watched, so that its holder is alive."""

    def see(self, lease: CoordinatorLease | None, now: float) -> None:
        """Take the register's content, which was read before `now`."""
        version = None if lease is None else lease.version
        self.lease = lease
        if version != self.version:
            self.renewed = lease is not None and not lease.released and self.version is not None
            self.version = version
            self.since = now

    def silent(self, now: float) -> float:
        """Seconds for which the lease has not been renewed."""
        return now - self.since

    def is_free(self, now: float) -> bool:
        """Whether the lease may be taken, by a replacement of the version that was seen."""
        return self.lease is None or self.lease.released or self.silent(now) >= LEASE_SECONDS


def acts(renewed: float, now: float) -> bool:
    """Whether the holder, whose last successful renewal began at `renewed`, may act."""
    return now - renewed < ACTING_SECONDS
