"""Checks before the ranks connect: the limit of open files, and whether rank 0 accepts connections. Needs no torch.

torch writes C++ stack frames to stderr if it cannot connect to its store, so a plain socket connects first and a failure is one clear
error.
"""

from __future__ import annotations

import resource
import socket
import time
from datetime import timedelta

from meshwright.spec.errors import CommunicationFailure, OutOfResources
from meshwright.spec.rank_environment import RankEnvironment

BASE_FILES = 64
"""File descriptors of a rank for libraries, data and logs."""
FILES_PER_RANK = 2
"""File descriptors of a rank for its Gloo connections to each other rank."""
RETRY_SECONDS = 0.2
"""Time between two attempts to connect."""


def raise_file_limit(ranks: int) -> None:
    """Raise the soft limit of open files to the hard limit; raises OutOfResources if that is too low for `ranks` ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    need = BASE_FILES + FILES_PER_RANK * ranks
    if hard != resource.RLIM_INFINITY and hard < need:
        raise OutOfResources(
            f"a process may open {hard} files here, and each rank of a job of {ranks} ranks needs about {need}; "
            f"raise the limit (ulimit -n {need}) and start again"
        )


def reach(environment: RankEnvironment, limit: timedelta) -> None:
    """Return once rank 0 accepts connections at its address. Raises CommunicationFailure if it does not within `limit`."""
    deadline = time.monotonic() + limit.total_seconds()
    while True:
        try:
            with socket.create_connection(
                (environment.address, environment.port), timeout=max(0.1, deadline - time.monotonic())
            ):
                return
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise CommunicationFailure(
                    f"rank {environment.rank} cannot reach rank 0 at {environment.address}:{environment.port} (tried for "
                    f"{limit.total_seconds():.0f} s: {error.strerror or error}); check that rank 0 is running, and MASTER_ADDR and "
                    "MASTER_PORT"
                ) from error
            time.sleep(RETRY_SECONDS)
