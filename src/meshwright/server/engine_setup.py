"""Starts the engine's processes, one for each device, and holds the socket to the first of them (rank 0)."""

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
"""Size of the socket's send buffers. They are large so that an engine step need not wait for the HTTP process."""
END_SECONDS = 5.0
"""Seconds that the engine's processes have to end after the socket is closed; then they are killed."""
WATCH_SECONDS = 0.5
"""Seconds between two checks whether ranks 1, 2, … still run."""
REPORT_SECONDS = 1.0
"""Seconds that rank 0 has to report why another rank has ended. After that, a general error is reported."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What the engine's processes need to start: model, options and devices. They get it as JSON on stdin."""

    # Folder of the model, and folder of its tokenizer if that is another one.
    folder: str
    tokenizer: str | None
    options: dict[str, Any]
    """Fields of `EngineSettings`, and `absorb`: whether decode steps of latent attention attend to the latents directly."""
    adapter: str | None = None
    """Folder of LoRA adapters, which are merged into the weights."""
    speculate: int = 0
    """Draft tokens of a request that each step verifies; 0 without speculative decoding."""
    draft_model: str | None = None
    """Folder of the draft model, or `spec.serve.MTP` for the model's own MTP modules."""
    cluster: ClusterSpec | None = None
    """This host, with one device for each rank. None: one process."""
    experts: ExpertRanks = ONE_RANK
    """How the ranks share the experts of an MoE model. If several ranks do, they are the ranks of this engine."""
    transfer: TransferSetup | None = None
    """Role and peers of an engine that exchanges KV blocks with others; None if it does not."""

    @property
    def ranks(self) -> int:
        """Number of engine processes, one for each rank."""
        return 1 if self.cluster is None else self.cluster.ranks


class EngineProcess:
    """The engine's processes. This process is connected by a socket pair to rank 0."""

    def __init__(self, setup: EngineSetup) -> None:
        """Start the processes. They load the model while this process goes on."""
        self._client: EngineClient | None = None
        self._end, theirs = socket.socketpair()
        for end in (self._end, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        with theirs, socket.create_server((LOOPBACK, 0)) as store:
            self._processes = [_start(setup, rank, theirs, store) for rank in range(setup.ranks)]

    async def connect(self, client: EngineClient) -> None:
        """Let `client` send and receive messages over the socket to rank 0."""
        self._client = client
        await connect(client, self._end)

    async def watch(self, client: EngineClient) -> None:
        """Wait until any rank but the first ends, then report the failure to `client`.

        The end of the first rank needs no watching: it closes the socket. With one rank this returns at once.
        """
        others = self._processes[1:]
        while others and all(process.poll() is None for process in others):
            await asyncio.sleep(WATCH_SECONDS)
        if others:
            await asyncio.sleep(REPORT_SECONDS)
            client.fail("one of the engine's ranks has ended", EXIT_COMMUNICATION)

    def close(self) -> None:
        """Close the socket and wait until the processes have ended. Kill those that take longer than `END_SECONDS`.

        Processes that still import or load the model are killed at once: they hold nothing that must be finished.
        """
        starts = self._client is None or (self._client.ready is None and self._client.failure is None)
        with suppress(OSError):  # rank 0 may have ended already
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
    """Start the process of one rank.

    Rank 0 inherits two sockets: `engine`, to this process, and `store`, on which the ranks' store listens.
    """
    passed = [engine.fileno(), store.fileno()] if rank == 0 else []
    # With the default policy, OpenMP threads spin while they wait for each other. If another process needs a core too,
    # they stall for half a second.
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
        start_new_session=True,  # so that Ctrl-C reaches only the HTTP process, which drains first
    )
    assert process.stdin is not None, "it is a pipe"
    with suppress(OSError), process.stdin:  # if the process has ended already, its exit code tells why
        # Not an argument: it has the transfer key, and others can read arguments.
        process.stdin.write(json.dumps(to_plain(setup)).encode())
    return process
