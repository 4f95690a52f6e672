"""Processes of a deployment that end by faults and are started again, and a proxy that damages blocks. For `serve_deployment_soak.py`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HEADER = struct.Struct("!II")
"""Header of a message between engines: bytes of its JSON, and bytes beside it."""
READY = ("serving ", "routing ", "keeping ")
"""Beginnings of the line that a process prints once it takes requests."""
PORTS = (20_000, 30_000)
END_SECONDS = 30.0
"""Longest time that a process may take to end by SIGTERM."""


@dataclass
class Outage:
    """A time in which a process was not there."""

    role: str
    began: float
    ended: float = float("inf")


class SupervisedProcess:
    """A process that is started again whenever it ends."""

    def __init__(self, name: str, role: str, words: list[str], environment: dict[str, str], log: Path) -> None:
        self.name, self.role, self._words, self._environment, self._log = name, role, words, environment, log
        self.outages: list[Outage] = []
        self.ready = asyncio.Event()
        self.engines_seen: set[int] = set()
        """Ids of all engine processes that were its children."""
        self.lines: list[str] = []
        """Its output since it was started last."""
        self._ending = False
        self._process: asyncio.subprocess.Process | None = None
        self._task = asyncio.ensure_future(self._supervise())

    @property
    def pid(self) -> int:
        """Id of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    def kill(self, *, engine: bool) -> None:
        """End the process, or with `engine` that of its engine, by SIGKILL."""
        self.ready.clear()
        self.outages.append(Outage(self.role, time.monotonic()))
        engines = self.engines()
        os.kill(engines[0] if engine and engines else self.pid, signal.SIGKILL)

    def engines(self) -> list[int]:
        """Ids of its engine's processes."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        found = [int(pid) for pid in children if _is_engine(int(pid))]
        self.engines_seen.update(found)
        return found

    async def end(self) -> int:
        """End the process by SIGTERM, for good; its exit code."""
        assert self._process is not None
        self._ending = True
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._task, END_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        return self._process.returncode or 0

    def orphans(self) -> list[int]:
        """Engine processes that are there although their server is not."""
        current = set() if self._ending else set(self.engines())
        return [pid for pid in self.engines_seen - current if _is_engine(pid)]

    async def _supervise(self) -> None:
        while not self._ending:
            with self._log.open("ab") as errors:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "meshwright",
                    *self._words,
                    env=self._environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                )
            assert self._process.stdout is not None
            self.lines = []
            async for line in self._process.stdout:
                self.lines.append(line.decode(errors="replace").rstrip())
                if self.lines[-1].startswith(READY):
                    self.engines()
                    for outage in self.outages:
                        outage.ended = min(outage.ended, time.monotonic())
                    self.ready.set()
            await self._process.wait()
            if self.ready.is_set() and not self._ending:  # it has ended by itself
                self.ready.clear()
                self.outages.append(Outage(self.role, time.monotonic()))


class DamagingProxy:
    """Passes messages between engines on, each direction by itself, and damages blocks or cuts a transfer when told to."""

    def __init__(self, port: int, target: int) -> None:
        self._port, self.target = port, target
        """`target` is the port of the process behind it."""
        self.damage = 0
        """Messages with blocks that are still to be damaged."""
        self.damaged = 0
        self.at_transfer: Callable[[], None] | None = None
        """Called once in the middle of the next message with blocks."""
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)

    def cut(self) -> None:
        """End all connections."""
        for end in list(self._ends):
            end.transport.abort()

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._ends.add(writer)
        ways = [
            asyncio.ensure_future(self._pass_on(*ends)) for ends in ((reader, target_writer), (target_reader, writer))
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, target_writer):
            end.transport.abort()
        await asyncio.gather(*ways)
        self._ends.discard(writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                header = await reader.readexactly(HEADER.size)
                length, size = HEADER.unpack(header)
                message, content = await reader.readexactly(length), bytearray(await reader.readexactly(size))
                if size and self.damage:
                    self.damage, self.damaged = self.damage - 1, self.damaged + 1
                    content[size // 3] ^= 4
                writer.write(header + message + content[: size // 2])
                await writer.drain()
                if size and self.at_transfer is not None:
                    action, self.at_transfer = self.at_transfer, None
                    action()
                writer.write(content[size // 2 :])
                await writer.drain()


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now, outside of those that the system gives to connections, so that a process can come back to its port."""
    ports: list[int] = []
    for port in random.sample(range(*PORTS), PORTS[1] - PORTS[0]):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            break
    return ports


def _is_engine(pid: int) -> bool:
    try:
        return b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
