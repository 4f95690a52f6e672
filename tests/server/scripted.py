"""Servers that answer a router by a script, and a client of the router."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from meshwright.server.instances import Instances
from meshwright.server.router import ClientConnection
from meshwright.server.router_state import Router
from meshwright.spec.route import RouteSpec

WHOLE = b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"text": 1}'
OPENING = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [b'data: {"a": 0\r\n\r\n}\n\n', b"data: [DONE]\n\n"]
STREAM = OPENING + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS) + b"0\r\n\r\n"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}"
FULL = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"


@dataclass
class Server:
    """A server that answers each request with the same bytes."""

    answer: bytes = WHOLE
    role: str = "decode"
    port: int = 0
    ends: bool = False
    """Whether it ends the connection after an answer."""
    opening: bytes = b""
    """The beginning of the answer, which is not held."""
    hold: asyncio.Event | None = None
    """It answers only once this is set."""
    health: bytes | None = None
    """Answer to /health instead of that of a ready server."""
    connections: int = 0
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    """Connections of requests that are held."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the router has closed a connection with a request."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counted = False
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if b"GET /health" in head and self.health is not None:
                    writer.write(self.health)
                    return
                if b"GET /health" in head:
                    content = json.dumps({"status": "ready", "role": self.role}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))
                    continue
                self.connections, counted = self.connections + (not counted), True
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(length))
                writer.write(self.opening)
                if self.hold is not None:
                    self.writers.append(writer)
                    closing = asyncio.ensure_future(reader.read(1))
                    held = asyncio.ensure_future(self.hold.wait())
                    await asyncio.wait([closing, held], return_when=asyncio.FIRST_COMPLETED)
                    if closing.done():
                        self.left.set()
                        return
                    closing.cancel()
                writer.write(self.answer)
                if self.ends:
                    return
        except (EOFError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def routed(
    *servers: Server, clock: Callable[[], float] = time.monotonic, **settings: Any
) -> AsyncIterator[tuple[Router, int]]:
    """A router in front of servers that are healthy, and its port."""
    listening = [await asyncio.start_server(server.serve, "127.0.0.1", 0) for server in servers]
    for server, end in zip(servers, listening, strict=True):
        server.port = end.sockets[0].getsockname()[1]
    urls = tuple(f"http://127.0.0.1:{server.port}" for server in servers)
    spec = RouteSpec(instances=urls, **settings)
    instances = Instances(urls, spec.requests, spec.health_seconds, spec.silent_seconds, clock=clock)
    router = Router(spec, instances)
    await router.instances.look()
    front = await asyncio.get_running_loop().create_server(lambda: ClientConnection(router), "127.0.0.1", 0)
    try:
        yield router, front.sockets[0].getsockname()[1]
    finally:
        for end in (front, *listening):
            end.close()


def request(body: bytes = b"{}", path: bytes = b"/v1/completions", *lines: bytes) -> bytes:
    head = b"".join(line + b"\r\n" for line in (b"host: localhost", b"content-length: %d" % len(body), *lines))
    return b"POST %b HTTP/1.1\r\n%b\r\n%b" % (path, head, body)


async def exchange(port: int, *requests: bytes, sizes: Sequence[int] = ()) -> bytes:
    """All that comes back for requests on one connection, the last of which ends it; sent in pieces of `sizes`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = b"".join(requests)
    for size in sizes:
        writer.write(data[:size])
        data = data[size:]
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(data)
    content = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return content


LAST = b"connection: close"


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def assert_lost(content: bytes) -> None:
    """The answer to a request that may have ended servers: clients do not send it again."""
    head, _, body = content.lower().partition(b"\r\n\r\n")
    assert head.startswith(b"http/1.1 503") and b"x-should-retry: false" in head and b"retry-after" not in head
    assert json.loads(body)["error"]["code"] == "server_lost"


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)
