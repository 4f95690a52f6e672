"""The processes of the engine, one for each device, and the socket to the first of them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from meshwright.events.parent import PARENT
from meshwright.server.engine_client import EngineClient, connect
from meshwright.server.transfers import TransferSetup
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.engine import ONE_RANK, ExpertRanks
from meshwright.spec.errors import EXIT_COMMUNICATION
from meshwright.spec.fields import to_plain
from meshwright.spec.host_limits import usable_cores
from meshwright.spec.rank_environment import STORE_SOCKET
from meshwright.spec.secrets import without_secrets

log = logging.getLogger("meshwright.server")
BUFFER_BYTES = 4 << 20
"""Size of the socket's buffers: a step of the engine does not wait for the HTTP process."""
END_SECONDS = 5.0
"""Longest time that the engine's processes may take to end."""
WATCH_SECONDS = 0.5
"""Time between two looks at the processes of several ranks."""
REPORT_SECONDS = 1.0
"""Time in which the first rank may report why another has ended."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """Model, options and devices of an engine's processes."""

    folder: str
    tokenizer: str | None
    options: dict[str, Any]
    """Fields of `EngineSettings`, and `absorb`."""
    adapter: str | None = None
    """Folder of adapters that are merged into the weights."""
    speculate: int = 0
    draft_model: str | None = None
    """Folder of the draft model, or `spec.serve.MTP`."""
    cluster: ClusterSpec | None = None
    """This host with a device for each rank; None: one process."""
    experts: ExpertRanks = ONE_RANK
    """Ranks that share the experts; if there are several, these are the ranks of the engine."""
    transfer: TransferSetup | None = None
    """Role and peers; None: the engine exchanges nothing with others."""

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return 1 if self.cluster is None else self.cluster.ranks


class EngineProcess:
    """The engine's processes; the first has the other end of a socket."""

    def __init__(self, setup: EngineSetup) -> None:
        """Start the processes, which load the model."""
        self._client: EngineClient | None = None
        self._end, theirs = socket.socketpair()
        for end in (self._end, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        with theirs, socket.create_server((LOOPBACK, 0)) as store:
            self._processes = [_start(setup, rank, theirs, store) for rank in range(setup.ranks)]

    async def connect(self, client: EngineClient) -> None:
        """Connect `client` to the engine."""
        self._client = client
        await connect(client, self._end)

    async def watch(self, client: EngineClient) -> None:
        """Report a failure to `client` once a rank beside the first has ended; the end of the first closes the socket."""
        others = self._processes[1:]
        while others and all(process.poll() is None for process in others):
            await asyncio.sleep(WATCH_SECONDS)
        if others:
            await asyncio.sleep(REPORT_SECONDS)
            client.fail("one of the engine's ranks has ended", EXIT_COMMUNICATION)

    def close(self) -> None:
        """Close the socket, and wait until the processes have ended; kill them if that takes long.

        Those that still import or load have nothing to end, and are killed at once.
        """
        starts = self._client is None or (self._client.ready is None and self._client.failure is None)
        with suppress(OSError):  # the process has ended
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
        deadline = time.monotonic() + (0.0 if starts else END_SECONDS)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                if not starts:
                    log.warning(
                        "the engine's process %d is killed: it has not ended within %g s", process.pid, END_SECONDS
                    )
                process.kill()
                process.wait()


def _start(setup: EngineSetup, rank: int, engine: socket.socket, store: socket.socket) -> subprocess.Popen[bytes]:
    """Start a rank; the first gets the socket of the engine and that of the ranks' store."""
    passed = [engine.fileno(), store.fileno()] if rank == 0 else []
    # Threads that spin while they wait for each other stall for half a second when another process needs a core too.
    variables: Mapping[str, Any] = {"OMP_WAIT_POLICY": "passive", **without_secrets(), PARENT: os.getpid()}
    if setup.ranks > 1:
        variables = {
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": max(1, usable_cores() // setup.ranks),
            **variables,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": setup.ranks,
            "LOCAL_WORLD_SIZE": setup.ranks,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": store.getsockname()[1],
            **({STORE_SOCKET: store.fileno()} if rank == 0 else {}),
        }
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright.server.engine_process", str(engine.fileno() if rank == 0 else -1)],
        env={name: str(value) for name, value in variables.items()},
        stdin=subprocess.PIPE,
        pass_fds=passed,
        start_new_session=True,  # Ctrl-C is for the HTTP process, which drains
    )
    assert process.stdin is not None, "it is a pipe"
    with suppress(OSError), process.stdin:  # it may have ended, as its code tells
        process.stdin.write(json.dumps(to_plain(setup)).encode())  # has the transfer key, and arguments are public
    return process
