"""The servers to which a router sends requests: their health and their load, and the choice of a server for each request."""

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
"""Bytes of a text block, for `prefix_hashes`. Blocks are compared to find a server that has computed the same prefix before."""
MOST_PREFIX_BLOCKS = 128
"""Only the first blocks of a request are compared, at most this number."""
TOKEN_BYTES = 4
"""Approximate number of bytes of a token in text."""
_MOST_SEARCHED = 64 << 10
"""The beginning of the prompt (one of `_PROMPT_KEYS`) is searched for in this many bytes of the body."""
_PROMPT_KEYS = (b'"messages"', b'"prompt"')
"""JSON keys after which the prompt of a request begins."""


class RouterConnection(Protocol):
    """A connection from the router to a server, as this module needs it."""

    def abort(self) -> None:
        """Close the connection. Its request is sent to another server, or its answer ends with an error."""
        ...


@dataclass(eq=False)
class ServerInstance:
    """A server to which the router sends requests."""

    host: str
    """IP address of the server."""
    port: int
    clock: Callable[[], float] = time.monotonic
    healthy: bool = False
    """Whether the last health check and the last attempt to connect succeeded. Only healthy servers get new requests."""
    checks: ServerHealth = field(default_factory=ServerHealth)
    """The state of the health checks."""
    listed: bool = True
    """Whether the last look-up of the host name gave this address."""
    heard: float = 0.0
    """Time when the last byte arrived from the server, on any connection."""
    role: str = "both"
    """Role of the server's engine, as the last health check reported it."""
    requests: int = 0
    """Number of unfinished requests that this router has sent to the server."""
    answered: int = 0
    """Number of answers that the server has begun."""
    idle: list[Any] = field(default_factory=list)
    """Open connections that have no request."""
    busy: set[RouterConnection] = field(default_factory=set)
    """Connections that have a request."""
    logged: tuple[bool, str] | None = None
    """The values of `healthy` and `role` when the state was logged last."""

    @property
    def usable(self) -> bool:
        """Whether the server accepts requests for generation. A server with the role "prefill" does not."""
        return self.healthy and self.listed and self.role != "prefill"

    @property
    def name(self) -> str:
        """Address of the server, HOST:PORT."""
        return f"{self.host}:{self.port}"

    def log(self, state: str) -> None:
        """Log `state` if the server's health or role has changed since it was logged last."""
        if self.logged != (self.healthy, self.role):
            self.logged = self.healthy, self.role
            log.info("%s %s", self.name, state)

    def give_up(self) -> None:
        """Close all connections. Their requests are sent to other servers, or their answers end with an error."""
        self.close_idle()
        for connection in list(self.busy):
            connection.abort()

    def close_idle(self) -> None:
        """Close the connections that have no request."""
        idle = self.idle
        self.idle = []
        for connection in idle:
            connection.abort()


class Instances:
    """All servers of a router. A URL may name a host with several addresses; each address is a server."""

    def __init__(
        self,
        urls: Sequence[str],
        most_requests: int,
        health_seconds: float,
        silent_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the servers of `urls`.

        - `most_requests`: largest number of unfinished requests that the router sends to one server.
        - `health_seconds`: time between two health checks.
        - `silent_seconds`: time limit of a health check. A server that sends nothing for this time may be lost (`health_after`).

        Raises BadInput for malformed URLs.
        """
        self._clock = clock
        self._targets = targets_of(urls)
        self._request_limit = most_requests
        self._health_seconds = health_seconds
        self._silent_seconds = silent_seconds
        self.all: dict[tuple[str, int], ServerInstance] = {}
        self._addresses: dict[tuple[str, int], set[tuple[str, int]]] = {}
        """For each `(host, port)` of the URLs: the addresses that the last successful look-up of the host name gave."""
        self._unknown: set[tuple[str, int]] = set()
        """The `(host, port)` whose look-up has never succeeded. It is logged only once."""
        self._routing: RequestRouting[ServerInstance] = RequestRouting()
        self.known = asyncio.Event()
        """An event that is set when the first server is usable, or when all servers were checked once.

        So at its start, the router does not wait for a server that hangs.
        """

    @property
    def usable(self) -> list[ServerInstance]:
        """The servers that accept requests for generation."""
        return [instance for instance in self.all.values() if instance.usable]

    def choose(self, body: bytes, tried: Iterable[ServerInstance] = ()) -> ServerInstance | None:
        """Choose the server for a request, by the prefix of its prompt and by the load of the servers.

        Returns None if each usable server is in `tried` or has its largest number of requests.
        """
        excluded = set(tried)
        free = [each for each in self.usable if each.requests < self._request_limit and each not in excluded]
        if not free:
            return None
        return self._routing.choose(free, prefix_hashes(body), PREFIX_BYTES / TOKEN_BYTES)

    async def watch(self) -> None:
        """Look up addresses and check the health of all servers, again and again until the task is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._health_seconds)

    async def look(self) -> None:
        """Look up addresses and check the health of all servers once."""
        try:
            await self._refresh()
            await asyncio.gather(*(self._check(instance) for instance in list(self.all.values())))
        finally:
            self.known.set()

    async def _refresh(self) -> None:
        """Look up the addresses of all host names. A server whose address is no longer among them gets no more requests."""
        for host, port in self._targets:
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                # The name server may be unreachable for some time. The old addresses stay in use.
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
        """Check the health of a server. Any error counts as a missed check, also a malformed answer."""
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
    """Send `GET /health` to a server. Returns its answer and its role. Raises an error for a malformed answer."""
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
    """Return a chain of hashes over the text of a request, from its prompt or messages on, one for each full block of `PREFIX_BYTES`.

    Each hash also depends on all blocks before its block. So if two requests have the same hash i, their blocks 0 to i are equal.
    """
    start = next((at for key in _PROMPT_KEYS if (at := body.find(key, 0, _MOST_SEARCHED)) >= 0), 0)
    hashes = []
    previous = 0
    for block in range(min((len(body) - start) // PREFIX_BYTES, MOST_PREFIX_BLOCKS)):
        at = start + block * PREFIX_BYTES
        previous = xxhash.xxh3_64_intdigest(body[at : at + PREFIX_BYTES], previous)
        hashes.append(previous)
    return hashes


def targets_of(urls: Sequence[str]) -> list[tuple[str, int]]:
    """Return host and port of each URL. Raises BadInput for malformed URLs, with the setting `instances.INDEX` of each."""

    def target(index: int, url: str) -> tuple[str, int]:
        with attach_key(f"instances.{index}"):
            return target_of(url)

    return call_all(*(partial(target, index, url) for index, url in enumerate(urls)))


def target_of(url: str) -> tuple[str, int]:
    """Return host and port of a URL `http://HOST:PORT`. Raises BadInput for any other URL."""
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
