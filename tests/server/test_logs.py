"""Log of servers and router: requests, and changes of the servers behind the router."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from meshwright.server.app import RequestLog
from meshwright.server.instances import Instances

LOG = "meshwright.server"


def test_a_router_tells_when_a_server_becomes_ready_or_leaves(caplog: pytest.LogCaptureFixture) -> None:
    answers = [(503, "both"), (200, "decode"), (200, "decode"), (200, "prefill"), (503, "prefill"), (0, "")]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status, role = answers[0]
        writer.write(b'HTTP/1.1 %d x\r\n\r\n{"role": "%b"}' % (status, role.encode()) if status else b"")
        await writer.drain()
        writer.close()

    async def check() -> str:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as end:
            name = f"127.0.0.1:{end.sockets[0].getsockname()[1]}"
            instances = Instances([f"http://{name}"], 1, 1, 60)
            while answers:
                await instances.look()
                answers.pop(0)
            return name

    with caplog.at_level(logging.INFO, LOG):
        name = asyncio.run(check())
    states = ["is not ready", "is ready, role decode", "is ready, role prefill", "is not ready"]
    assert [record.message for record in caplog.records] == [f"{name} {state}" for state in states]


def test_a_router_tells_once_that_a_name_has_no_address(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        instances = Instances(["http://nowhere.invalid:80", "http://127.0.0.1:1"], 1, 1, 60)
        for _ in range(2):
            await instances.look()

    with caplog.at_level(logging.INFO, LOG):
        asyncio.run(check())
    (first, second) = (record.message for record in caplog.records)
    assert first.startswith("nowhere.invalid:80 has no address: ") and second == "127.0.0.1:1 does not answer"


def test_requests_for_health_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(*paths: str) -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("the application reads nothing")

        log = RequestLog(app)
        for path in paths:
            await log({"type": "http", "path": path, "method": "GET", "headers": []}, receive, send)

    with caplog.at_level(logging.INFO, LOG):
        asyncio.run(ask("/health", "/v1/models", "/health", "/metrics"))
    assert [record.message.partition(": 200")[0] for record in caplog.records] == [
        "request 1: GET /v1/models",
        "request 2: GET /metrics",
    ]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"", False),
        (b"a-1.b_2/{~}", True),
        (b"x" * 128, True),
        (b"x" * 129, False),
        (b"a b", False),
        (b"a\x1b[2J", False),
        (b"a\nrequest 9: GET /: 200", False),
        ("é".encode(), False),
    ],
)
@pytest.mark.parametrize("logs", [True, False])
def test_a_clients_id_is_kept(caplog: pytest.LogCaptureFixture, given: bytes, kept: bool, logs: bool) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the application reads nothing")

    headers = [(b"host", b"localhost"), (b"x-request-id", given)]
    with caplog.at_level(logging.INFO, LOG):
        scope = {"type": "http", "path": "/x", "method": "GET", "headers": headers}
        asyncio.run(RequestLog(app, logs=logs)(scope, receive, send))
    id = given if kept else b"1"
    assert sent[0]["headers"] == [(b"x-request-id", id)]
    assert [record.message.partition(": 200")[0] for record in caplog.records] == (
        [f"request {id.decode()}: GET /x"] if logs else []
    )
