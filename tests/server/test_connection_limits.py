"""What clients may do before their request is known: heads, time, number of connections; and answers that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from meshwright.connections.limits import SERVE, ListenerLimits
from meshwright.server.addresses import listening_socket
from meshwright.server.run import uvicorn_server

LARGE = bytes(20 << 20)
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers at once; /large has more bytes than socket buffers take, /late has an answer that never ends."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"keep-alive")]})
    body = LARGE if scope["path"] == "/large" else b"ok"
    await send({"type": "http.response.body", "body": body, "more_body": scope["path"] == "/late"})
    while scope["path"] == "/late" and (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def server(limits: ListenerLimits = SERVE) -> AsyncIterator[int]:
    """A server of `app`: its port."""
    end = listening_socket("127.0.0.1", 0, "port")
    serving = uvicorn_server(app, limits)
    task = asyncio.ensure_future(serving.serve(sockets=[end]))
    while not serving.started:
        await asyncio.sleep(0.01)
    try:
        yield end.getsockname()[1]
    finally:
        serving.should_exit = True
        await task


async def answers(port: int, *pieces: bytes) -> bytes:
    """Everything that the server sends until it closes the connection, or has been silent for a while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await exchange(reader, writer, *pieces)
    finally:
        writer.close()


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *pieces: bytes) -> bytes:
    received = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        while data := await asyncio.wait_for(reader.read(1 << 16), 0.3):
            received += data
    except TimeoutError:
        pass
    except ConnectionError:
        received += b"(closed)"
    return received


def head(size: int, line: bytes = b"x: ") -> bytes:
    """A request with a head of `size` bytes."""
    start = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + line
    return start + b"a" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("form", ["one header", "many headers", "path", "no end"])
def test_a_head_has_at_most_64_kib(form: str, pieces: int) -> None:
    most = SERVE.head_bytes

    def of(size: int) -> list[bytes]:
        data = {
            "one header": head(size),
            "many headers": head(size).replace(b"aaaaaaaa", b"\r\nb: ccc"),
            "path": b"GET /" + b"p" * (size - 18) + b" HTTP/1.1\r\n\r\n",
            "no end": b"GET / HTTP/1.1\r\nx: " + b"a" * (size - 19),
        }[form]
        assert len(data) == size
        step = -(-size // pieces)
        return [data[start : start + step] for start in range(0, size, step)]

    async def check() -> None:
        async with server() as port:
            whole = await answers(port, *of(most))
            assert whole.startswith(b"HTTP/1.1 431 " if form == "no end" else b"HTTP/1.1 200 ")
            refused = await answers(port, *of(most + 2000), *[b"b" * 65536] * 20)
            assert refused.startswith(b"HTTP/1.1 431 ") or refused == b"(closed)"
            assert (await answers(port, HEALTH)).startswith(b"HTTP/1.1 200 ")

    asyncio.run(check())


def test_the_end_of_a_head_may_come_in_any_pieces_before_a_long_body() -> None:
    """The body, which is longer than a head may be, is none of its bytes."""
    request = b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"

    async def check() -> None:
        async with server() as port:
            for cut in range(1, 6):
                pieces = request[:-cut], request[len(request) - cut :] + b"b" * 100_000
                assert (await answers(port, *pieces, HEALTH)).count(b"HTTP/1.1 200 ") == 2
            assert (await answers(port, *(bytes([each]) for each in HEALTH))).startswith(b"HTTP/1.1 200 ")

    asyncio.run(check())


@pytest.mark.parametrize(
    ("sent", "limits"),
    [
        (b"", {"head_seconds": 0.3}),
        (b"GET / HTTP/1.1\r\nhost: ", {"head_seconds": 0.3}),
        (HEALTH + b"GET / HTTP/1.1\r\nhost: ", {"idle_seconds": 0.3}),
        (HEALTH, {"idle_seconds": 0.3}),
        (b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nx", {"head_seconds": 0.2}),
    ],
    ids=["nothing", "half a head", "half of a second head", "no next request", "half a body"],
)
def test_a_client_that_does_not_go_on_is_disconnected(sent: bytes, limits: dict[str, Any]) -> None:
    async def check() -> None:
        async with server(replace(SERVE, **limits)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 20)
            writer.close()

    asyncio.run(check())


@pytest.mark.parametrize("last", [b"", b"connection: close\r\n"])
def test_a_client_that_reads_nothing_of_its_answer_is_disconnected(last: bytes) -> None:
    async def check() -> None:
        async with server(replace(SERVE, idle_seconds=0.3)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
            writer.write(b"GET /large HTTP/1.1\r\nhost: localhost\r\n" + last + b"\r\n")
            await asyncio.sleep(2)
            received = 0
            with suppress(ConnectionError):
                while data := await asyncio.wait_for(reader.read(1 << 20), 20):
                    received += len(data)
            assert received < len(LARGE)

    asyncio.run(check())


def test_a_long_answer_and_a_client_that_reads_it_are_left_alone() -> None:
    async def check() -> None:
        async with server(replace(SERVE, head_seconds=0.3, idle_seconds=0.3)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /late HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(2.5)
            assert not reader.at_eof()
            writer.close()

    asyncio.run(check())


def test_idle_clients_make_room_and_busy_ones_do_not() -> None:
    async def check() -> None:
        async with server(replace(SERVE, connections=5)) as port:
            late, late_writer = await asyncio.open_connection("127.0.0.1", port)
            late_writer.write(b"GET /late HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await late.readline()
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
            for _ in range(3):
                assert (await answers(port, HEALTH)).startswith(b"HTTP/1.1 200 ")
            assert not late.at_eof() and await idle[0][0].read() == b""
            for _, writer in [*idle, (late, late_writer)]:
                writer.close()

    asyncio.run(check())


def test_many_requests_at_once_are_refused() -> None:
    async def check() -> None:
        async with server() as port:
            late = b"GET /late HTTP/1.1\r\nhost: localhost\r\n\r\n"
            assert b"ok" not in await answers(port, late + HEALTH * 1000)
            assert (await answers(port, HEALTH * 10)).count(b"HTTP/1.1 200 ") == 10

    asyncio.run(check())
