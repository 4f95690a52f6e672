"""The servers behind a router: their health and load, and which of them answers a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import xxhash

from meshwright.policies.request_routing import RequestRouting
from meshwright.policies.server_health import HealthAnswer, ServerHealth, health_after
from meshwright.spec.errors import BadInput, attach_key, call_all

log = logging.getLogger("meshwright.server")
PREFIX_BYTES = 256
"""Bytes of a block of a prompt's text. Blocks are compared to find the server that has computed the same prefix."""
MOST_PREFIX_BLOCKS = 128
TOKEN_BYTES = 4
"""Approximate bytes of a token of text."""
_MOST_SEARCHED = 64 << 10
"""Most bytes of a body in which the key of its prompt is looked for."""
_PROMPT_KEYS = (b'"messages"', b'"prompt"')


class RouterConnection(Protocol):
    """A connection to a server."""

    def abort(self) -> None:
        """Close the connection; its request ends or is sent to another server."""
        ...


@dataclass(eq=False)
class ServerInstance:
    """Server to which the router sends requests."""

    host: str
    port: int
    clock: Callable[[], float] = time.monotonic
    healthy: bool = False
    """Whether its last health check and its last connection were good, so that it gets new requests."""
    checks: ServerHealth = field(default_factory=ServerHealth)
    listed: bool = True
    """Whether its host name still has its address."""
    heard: float = 0.0
    """Time of its last byte on any connection."""
    role: str = "both"
    requests: int = 0
    """Unfinished requests of this router."""
    answered: int = 0
    idle: list[Any] = field(default_factory=list)
    """Open connections without a request."""
    busy: set[RouterConnection] = field(default_factory=set)
    """Connections with a request."""
    logged: tuple[bool, str] | None = None
    """Health and role that were logged last."""

    @property
    def usable(self) -> bool:
        """Whether it takes requests for text."""
        return self.healthy and self.listed and self.role != "prefill"

    @property
    def name(self) -> str:
        """Address of the server, HOST:PORT."""
        return f"{self.host}:{self.port}"

    def log(self, state: str) -> None:
        """Log its state if its health or role has changed since the last time."""
        if self.logged != (self.healthy, self.role):
            self.logged = self.healthy, self.role
            log.info("%s %s", self.name, state)

    def give_up(self) -> None:
        """Close all connections; its requests end or are sent to another server."""
        self.close_idle()
        for connection in list(self.busy):
            connection.abort()

    def close_idle(self) -> None:
        """Close the connections without a request."""
        idle = self.idle
        self.idle = []
        for connection in idle:
            connection.abort()


class Instances:
    """All servers of a router."""

    def __init__(
        self,
        urls: Sequence[str],
        most_requests: int,
        health_seconds: float,
        silent_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises BadInput for URLs that are none."""
        self._clock = clock
        self._targets = targets_of(urls)
        self._most = most_requests
        self._health_seconds = health_seconds
        self._silent_seconds = silent_seconds
        self.all: dict[tuple[str, int], ServerInstance] = {}
        self._addresses: dict[tuple[str, int], set[tuple[str, int]]] = {}
        """Addresses of each target, from the last successful look-up of its name."""
        self._unknown: set[tuple[str, int]] = set()
        """Targets that have had no address since the start, and were logged."""
        self._routing: RequestRouting[ServerInstance] = RequestRouting()
        self.known = asyncio.Event()
        """Set once one server takes requests, or all were checked: the router does not wait for a server that hangs."""

    @property
    def usable(self) -> list[ServerInstance]:
        """Servers that take requests for text."""
        return [instance for instance in self.all.values() if instance.usable]

    def choose(self, body: bytes, tried: Iterable[ServerInstance] = ()) -> ServerInstance | None:
        """The server for a request, by its prefix and the load of the servers; None if all are full or tried."""
        left = set(tried)
        free = [each for each in self.usable if each.requests < self._most and each not in left]
        if not free:
            return None
        return self._routing.choose(free, prefix_hashes(body), PREFIX_BYTES / TOKEN_BYTES)

    async def watch(self) -> None:
        """Look up addresses and check the servers' health until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._health_seconds)

    async def look(self) -> None:
        """Look up addresses and check the servers' health once."""
        try:
            await self._refresh()
            await asyncio.gather(*(self._check(instance) for instance in list(self.all.values())))
        finally:
            self.known.set()

    async def _refresh(self) -> None:
        """Look up the addresses of all host names; a server whose address is gone gets no more requests."""
        for host, port in self._targets:
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:  # the name server may be away for a while
                if (host, port) not in self._addresses and (host, port) not in self._unknown:
                    self._unknown.add((host, port))
                    log.info("%s:%d has no address: %s", host, port, getattr(error, "strerror", None) or error)
                continue
            self._addresses[host, port] = {(str(info[4][0]), port) for info in infos}
        found = {address for addresses in self._addresses.values() for address in addresses}
        for address in found - set(self.all):
            self.all[address] = ServerInstance(*address, clock=self._clock, heard=self._clock())
        for address, instance in list(self.all.items()):
            if instance.listed and address not in found:
                log.info("%s has no address any more", instance.name)
            instance.listed = address in found
            if not instance.listed and not instance.busy:
                self.all.pop(address).give_up()

    async def _check(self, instance: ServerInstance) -> None:
        """Check the health of a server; any error, also an answer of another form, is a missed check."""
        answer: HealthAnswer = "missed"
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._silent_seconds):
                answer, instance.role = await _health(instance)
            instance.heard = self._clock()
        checks = health_after(instance.checks, answer, self._clock() - instance.heard, self._silent_seconds)
        instance.checks = checks
        instance.healthy = checks.ready
        if checks.lost and instance.busy:
            log.info("%s is silent: its %d requests end or go to another server", instance.name, len(instance.busy))
        if checks.lost:
            instance.give_up()
        if instance.usable:
            self.known.set()
        state = "does not answer" if checks.missed else "is not ready"
        instance.log(f"is ready, role {instance.role}" if checks.ready else state)


async def _health(instance: ServerInstance) -> tuple[HealthAnswer, str]:
    """A server's answer to a check, and its role. Raises an error for an answer of another form."""
    reader, writer = await asyncio.open_connection(instance.host, instance.port)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        data = await reader.read(1 << 16)
        while b"\r\n\r\n" not in data or not data.partition(b"\r\n\r\n")[2].endswith(b"}"):
            more = await reader.read(1 << 16)
            if not more or len(data) > 1 << 16:
                raise ValueError("no answer")
            data += more
    finally:
        writer.close()
    answers: dict[bytes, HealthAnswer] = {b"200": "ready", b"503": "refusing"}
    answer = answers[data.split(b" ", 2)[1]]
    return answer, str(json.loads(data.partition(b"\r\n\r\n")[2]).get("role", instance.role))


def prefix_hashes(body: bytes) -> list[int]:
    """A chain of hashes over full blocks of the text of a request, from its prompt or messages on."""
    start = next((at for key in _PROMPT_KEYS if (at := body.find(key, 0, _MOST_SEARCHED)) >= 0), 0)
    hashes = []
    previous = 0
    for block in range(min((len(body) - start) // PREFIX_BYTES, MOST_PREFIX_BLOCKS)):
        at = start + block * PREFIX_BYTES
        previous = xxhash.xxh3_64_intdigest(body[at : at + PREFIX_BYTES], previous)
        hashes.append(previous)
    return hashes


def targets_of(urls: Sequence[str]) -> list[tuple[str, int]]:
    """Host and port of each URL. Raises BadInput, with the number of each, for those of another form."""

    def target(index: int, url: str) -> tuple[str, int]:
        with attach_key(f"instances.{index}"):
            return target_of(url)

    return call_all(*(partial(target, index, url) for index, url in enumerate(urls)))


def target_of(url: str) -> tuple[str, int]:
    """Host and port of `http://HOST:PORT`. Raises BadInput for another form."""
    problem = BadInput(f"expected http://HOST:PORT, got {url!r}")
    try:
        parts = urlsplit(url)
        host = parts.hostname
        port = parts.port
    except ValueError:
        raise problem from None
    if host is None or port is None or parts.scheme != "http" or parts.path not in ("", "/") or parts.query:
        raise problem
    return host, port
