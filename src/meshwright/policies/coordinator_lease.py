"""Decides when a process may coordinate a job, and when another process may take its place. Callers pass all times.

The lease is a small record that all hosts can reach. It changes only by compare-and-swap: a write succeeds only if the record still has the
version that the writer has read.

- The holder renews the lease every `RENEW_SECONDS`. It may act for `ACTING_SECONDS` after its last renewal, counted from before that write.
- Another process may take the lease when it has seen the same version for `LEASE_SECONDS`, counted from after that write.

So the holder always stops first, unless the other process' clock runs faster by a third (6 / 4.5). No process compares its time with
another host's.
"""

from __future__ import annotations

from dataclasses import dataclass

RENEW_SECONDS = 1.0
ACTING_SECONDS = 4.5
LEASE_SECONDS = 6.0
CONTEND_SECONDS = 2.5
"""If the lease was not renewed for this many seconds, an agent starts a process that will wait for it. The process needs time to load."""


@dataclass(frozen=True)
class CoordinatorLease:
    """The content of the lease record."""

    version: int
    """Increases by one at each write."""
    holder: str
    """Random id of the holding process."""
    process: str
    """Readable name of the holder, as in lock files (`durable.lock.this_process`)."""
    host: str
    """Name of the holder's machine. Names of the machine's agents begin with it."""
    address: str
    """HOST:PORT at which agents reach the holder."""
    released: bool = False
    """Whether the holder has ended regularly and released the lease."""

    @property
    def pid(self) -> int:
        """Process id of the holder, on its machine."""
        return int(self.process.split()[1])


class LeaseWatch:
    """What one process has seen of the lease. Times are in seconds of a clock of this host that never goes back."""

    def __init__(self, version: int | None = None, since: float = 0.0) -> None:
        """Continue for another process of this host, which has seen `version` without a change since the time `since`."""
        self.lease: CoordinatorLease | None = None
        self.version = version
        self.since = since
        self.renewed = False
        """Whether the lease was renewed while it was watched. If so, its holder was alive."""

    def see(self, lease: CoordinatorLease | None, now: float) -> None:
        """Note the content of the record, which was read before `now`."""
        version = None if lease is None else lease.version
        self.lease = lease
        if version != self.version:
            self.renewed = lease is not None and not lease.released and self.version is not None
            self.version = version
            self.since = now

    def silent(self, now: float) -> float:
        """Seconds since the last renewal that was seen."""
        return now - self.since

    def is_free(self, now: float) -> bool:
        """Whether the lease may be taken, by replacing the version that was seen."""
        return self.lease is None or self.lease.released or self.silent(now) >= LEASE_SECONDS


def acts(renewed: float, now: float) -> bool:
    """Whether the holder may act now. `renewed` is the time at which its last successful renewal began."""
    return now - renewed < ACTING_SECONDS
