"""The snapshot server next to an agent: a process that serves this host's snapshots and stores copies of another
host's.

The agent owns the listening socket and the memory of the copies. If the server dies, a new server continues with both.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from meshwright.checkpoint.memory.snapshots import SLOTS
from meshwright.connections.accept import listen_at
from meshwright.events.terminal import write_line
from meshwright.launch.local import empty_snapshot_buffers
from meshwright.spec.listen_address import address_text
from meshwright.spec.run import RunSpec
from meshwright.spec.secrets import without_secrets


@contextmanager
def snapshot_server(run: RunSpec, address: str, buffers: Sequence[str]) -> Iterator[SnapshotServerProcess | None]:
    """Run the server of this host's `buffers` during a `with` block. Yields None if the run has no partner hosts."""
    if run.checkpoint.partner == "none" or run.cluster.nodes == 1:
        yield None
        return
    with closing(SnapshotServerProcess(address, buffers)) as server:
        yield server


class SnapshotServerProcess:
    """The snapshot server's process.

    It listens on a free port of `address` and serves `buffers`, the files of this host's ranks.
    """

    def __init__(self, address: str, buffers: Sequence[str]) -> None:
        self._listener = listen_at((address, 0))
        self._paths = json.dumps({"buffers": list(buffers), "slots": empty_snapshot_buffers(SLOTS * len(buffers))})
        self.address = address_text(address, self._listener.getsockname()[1])
        """HOST:PORT of the server, for the variable `snapshot_transport.SERVER_VARIABLE`."""
        self._process = self._start()

    def revive(self) -> None:
        """Start another server if the last one has ended."""
        if self._process.poll() is not None:
            write_line(
                f"meshwright: the snapshot server ended with code {self._process.returncode}; another one was started"
            )
            self._process = self._start()

    def close(self) -> None:
        """Kill the server and close its socket."""
        self._process.kill()
        self._process.wait()
        self._listener.close()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the server's process, which inherits the listening socket."""
        descriptor = self._listener.fileno()
        command = [sys.executable, "-m", "meshwright.checkpoint.memory.server", str(descriptor), self._paths]
        return subprocess.Popen(
            command, pass_fds=[descriptor], stdin=subprocess.DEVNULL, start_new_session=True, env=without_secrets()
        )
