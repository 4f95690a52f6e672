"""How the coordinator keeps its lease, and how agents watch the lease.

A process may coordinate only while it holds the lease. If it loses the lease, another process takes its place.

Times are in seconds of a clock of this host that continues while the host is suspended. A process and the processes that it starts share
this clock.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from meshwright.durable.lock import this_process
from meshwright.events.terminal import write_line
from meshwright.launch.control import ControlClient, coordinator_address
from meshwright.launch.lease_store import LeaseStore
from meshwright.policies.coordinator_lease import (
    CONTEND_SECONDS,
    LEASE_SECONDS,
    RENEW_SECONDS,
    CoordinatorLease,
    LeaseWatch,
    acts,
)
from meshwright.spec.errors import BadInput
from meshwright.spec.rank_environment import machine_name

LOOK_SECONDS = 1.0
"""Seconds between two reads of the lease."""
UNREACHABLE_SECONDS = 30.0
"""How long a process tries to take the lease while the store fails."""
PENDING_SECONDS = 2.0
"""If a report is not answered within these seconds, its agent reads the lease to find out whether the coordinator has moved."""
SEEN_VARIABLE = "MESHWRIGHT_LEASE_SEEN"
"""Environment variable for a process that an agent starts: which version of the lease the agent has seen, and since when.

The process counts `LEASE_SECONDS` from that time, not from its own start.
"""


def lease_clock() -> float:
    """The current time on the clock for leases, in seconds."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def own_machine() -> str:
    """The name of this machine. Names of its agents begin with it."""
    return machine_name().replace("/", "-")[:200]


class LeaseTaken(BadInput):
    """Another process already coordinates the run."""


class HeldLease:
    """The lease that this process holds. A thread renews it; `close` releases it."""

    def __init__(
        self, store: LeaseStore, lease: CoordinatorLease, renewed: float, before: CoordinatorLease | None
    ) -> None:
        """`renewed` is a time just before the lease was written. `before` is the lease that it replaced."""
        self._store = store
        self._lease = lease
        self._renewed = renewed
        self.lost = None if before is None or before.released else before
        """The previous lease, if it ended without a release because its holder or the holder's host was lost; else None."""
        self.taken: CoordinatorLease | None = None
        """The lease of another process that has replaced this one; None if there is none."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew_regularly, name="lease", daemon=True)
        self._thread.start()

    @property
    def acts(self) -> bool:
        """Whether this process may coordinate now."""
        return self.taken is None and acts(self._renewed, lease_clock())

    def close(self) -> None:
        """Release the lease, so that the next process does not have to wait until it expires."""
        self._closing.set()
        self._thread.join(LEASE_SECONDS)
        if self._thread.is_alive() or self.taken is not None:
            return
        with suppress(OSError, BadInput):
            self._store.replace(self._lease, replace(self._lease, version=self._lease.version + 1, released=True))

    def _renew_regularly(self) -> None:
        while self.taken is None and not self._closing.wait(RENEW_SECONDS):
            with suppress(OSError, BadInput):  # then the lease ends, unless a later renewal succeeds
                self._renew()

    def _renew(self) -> None:
        began = lease_clock()
        new = replace(self._lease, version=self._lease.version + 1)
        if self._store.replace(self._lease, new):
            self._lease = new
            self._renewed = began
            return
        newest = self._store.read()
        if newest is None:
            # Someone has deleted the run's folder and the lease in it. Agents then start no other coordinator (`CoordinatorWatch._look`).
            # This one continues until it cannot write its state. Then the job ends with a message that says why.
            self._renewed = began
        elif newest.holder == self._lease.holder:
            # An earlier renewal was written, but its answer was lost. The time of that write is not known, so `_renewed` is not changed
            # before the next renewal.
            self._lease = newest
        else:
            self.taken = newest


def take_coordinator_lease(store: LeaseStore, address: str) -> HeldLease:
    """Wait until the lease is free, and take it. Agents will reach this process at `address`.

    Raises LeaseTaken if the holder is alive, BadInput if the store cannot hold a lease, and OSError if the store cannot be reached for
    `UNREACHABLE_SECONDS`.
    """
    version, _, since = os.environ.pop(SEEN_VARIABLE, "").partition(":")
    watch = LeaseWatch(int(version), float(since)) if version else LeaseWatch()
    own = CoordinatorLease(0, secrets.token_hex(8), this_process(), own_machine(), address)
    before: CoordinatorLease | None = None
    reached = lease_clock()
    while True:
        try:
            seen = store.read()
            reached = lease_clock()
            watch.see(seen, reached)
            written = (
                seen is not None and seen.holder == own.holder
            )  # an earlier write succeeded, but its answer was lost
            if written or watch.is_free(reached):
                before = before if written else seen
                new = replace(own, version=1 if seen is None else seen.version + 1)
                if store.replace(seen, new):
                    return HeldLease(store, new, reached, before)
            elif watch.renewed and seen is not None:
                raise LeaseTaken(f"{seen.process}, at {seen.address}, coordinates this run; stop it first")
        except OSError:
            if lease_clock() - reached > UNREACHABLE_SECONDS:
                raise
        time.sleep(LOOK_SECONDS / 4)


class StartedProcess(Protocol):
    """The methods of a started process that a watch needs. `subprocess.Popen` has them."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def wait(self) -> int: ...


class CoordinatorWatch:
    """A thread of an agent that reads the lease while the agent gets no answer, or while it stands by to become the coordinator.

    If the lease has another address, the thread moves the agent's client there. If nobody has renewed the lease for `CONTEND_SECONDS`, the
    thread starts a process that waits for the lease and then coordinates.
    """

    def __init__(self, store: LeaseStore, client: ControlClient) -> None:
        """`client` is the agent's client. It is moved when the coordinator's address changes."""
        self._store = store
        self._client = client
        self._watch = LeaseWatch()
        self.start: Callable[[str], StartedProcess] | None = None
        """Starts a process that waits for the lease. Its argument is the value of `SEEN_VARIABLE`. None until starting one is possible."""
        self.standby = False
        """Whether the coordinator wants this agent to read the lease even while it gets answers."""
        self.unanswered = True
        """Whether the last report was not answered."""
        self.asked: float | None = None
        """Time at which the report was sent that waits for an answer; None if none waits."""
        self._process: StartedProcess | None = None
        self._next_start = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look_regularly, name="coordinator watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and a process that it has started, unless that process coordinates."""
        self._closing.set()
        self._thread.join(LOOK_SECONDS)
        if self._process is not None and self._process.poll() is None and not self._coordinates(self._process):
            self._process.terminate()
            self._process.wait()

    def _coordinates(self, process: StartedProcess) -> bool:
        try:
            lease = self._store.read()
        except (OSError, BadInput):
            return True  # if in doubt, let the process live
        return lease is not None and not lease.released and lease.process == this_process(process.pid)

    def _look_regularly(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            asked = self.asked
            late = self.unanswered or (asked is not None and lease_clock() - asked > PENDING_SECONDS)
            if late or self.standby:
                with suppress(OSError, BadInput):  # the next read may succeed; `take_coordinator_lease` reports errors
                    self._look(late)

    def _look(self, late: bool) -> None:
        lease = self._store.read()
        now = lease_clock()
        self._watch.see(lease, now)
        if lease is None:  # no coordinator has begun yet, or the run was deleted
            return
        if late and self._watch.renewed and not lease.released:
            self._client.move(coordinator_address(lease.address))
        # After a release, the run has usually ended. Then a process is started only if this agent gets no answer.
        may_be_free = late if lease.released else self._watch.silent(now) > CONTEND_SECONDS
        idle = self._process is None or self._process.poll() is not None
        if may_be_free and idle and now >= self._next_start and self.start is not None:
            self._next_start = now + LEASE_SECONDS
            try:
                self._process = self.start(f"{lease.version}:{self._watch.since}")
            except OSError as error:
                write_line(f"meshwright: no coordinator can be started here: {error}")
