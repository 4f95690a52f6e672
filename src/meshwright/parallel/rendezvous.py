"""Reaching the other ranks for the first time: open files, rank 0's address, and one sentence when they are missing.

torch writes C++ stack frames to stderr when its store cannot be reached, so a plain socket tries first. Torch-free.
"""

from __future__ import annotations

import resource
import socket
import time
from datetime import timedelta

from meshwright.spec.errors import CommunicationFailure, OutOfResources
from meshwright.spec.rank_environment import RankEnvironment

BASE_FILES, FILES_PER_RANK = 64, 2
"""Descriptors that a rank needs: libraries, data and logs; and for each other rank its connections in Gloo's groups."""
RETRY_SECONDS = 0.2


def raise_file_limit(ranks: int) -> None:
    """Raise the soft limit of open files to the hard limit. Raises OutOfResources if that is too low for so many ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    need = BASE_FILES + FILES_PER_RANK * ranks
    if hard != resource.RLIM_INFINITY and hard < need:
        raise OutOfResources(
            f"a process may open {hard} files here, and a rank of {ranks} needs about {need}; raise the limit (ulimit -n {need}) and "
            "start again"
        )


def reach(environment: RankEnvironment, limit: timedelta) -> None:
    """Return once rank 0 accepts connections at its address. Raises CommunicationFailure when it does not within `limit`."""
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
