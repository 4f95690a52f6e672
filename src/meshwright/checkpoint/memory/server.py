"""The process of a host's snapshot server. The host's agent starts it and outlives it.

Call: `python -m meshwright.checkpoint.memory.server DESCRIPTOR JSON`. DESCRIPTOR is the listening socket. JSON has the
paths of the agent's memory: `buffers` and `slots`, as in `SnapshotMemory`.

This module does not import torch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from meshwright.checkpoint.memory.snapshots import SnapshotMemory
from meshwright.checkpoint.memory.transport import SnapshotServer
from meshwright.connections.limits import raise_file_limit
from meshwright.spec.job_token import job_token

NICENESS = 5
"""Added to the niceness of the server, so that training's threads run first on a host with few cores."""
POLL_SECONDS = 0.5
"""Seconds between two checks whether the agent still lives."""


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    agent = os.getppid()
    os.nice(NICENESS)
    raise_file_limit()
    paths = json.loads(sys.argv[2])
    memory = SnapshotMemory(paths["buffers"], paths["slots"])
    server = SnapshotServer(socket.socket(fileno=int(sys.argv[1])), job_token(), memory)
    while os.getppid() == agent:
        server.serve(POLL_SECONDS)


if __name__ == "__main__":
    main()
