"""The client of a load test: what it sends, where, and what it notes of answers and of failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from meshwright.server.load_client import LoadTest, failures, prompt_tokens
from meshwright.spec.deployment import TimedRequest

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
Handler = Callable[[dict[str, Any], asyncio.StreamWriter], Coroutine[Any, Any, None]]


def test_prompts_have_their_length_and_share_their_blocks() -> None:
    first, second = (prompt_tokens(n, TimedRequest(0, 600, 1, (7,)), 1000) for n in (0, 1))
    assert len(first) == len(second) == 600 and all(0 <= token < 1000 for token in first + second)
    assert first[:512] == second[:512] and first[512:] != second[512:]
    assert len(prompt_tokens(0, TimedRequest(0, 100, 1, (7,)), 1000)) == 100
    assert first == prompt_tokens(0, TimedRequest(0, 600, 1, (7,)), 1000)
    other = prompt_tokens(0, TimedRequest(0, 600, 1, (7,)), 1000, "another test")
    assert other[:16] != first[:16]  # a cache block; a simulation begins with an empty cache too


async def replay(handlers: list[Handler], requests: list[TimedRequest]) -> tuple[LoadTest, list[list[dict[str, Any]]]]:
    """Send requests to servers that answer by these handlers; the test, and the bodies that each server received."""
    received: list[list[dict[str, Any]]] = [[] for _ in handlers]

    def accept(index: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")
            )
            body = json.loads(await reader.readexactly(length))
            received[index].append(body)
            await handlers[index](body, writer)
            writer.close()

        return answer

    servers = [await asyncio.start_server(accept(index), "127.0.0.1", 0) for index in range(len(handlers))]
    test = LoadTest([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers], 100)
    await test.run(requests)
    for server in servers:
        server.close()
    return test, received


def test_requests_go_to_the_server_with_the_fewest_and_their_times_are_noted() -> None:
    second_came = asyncio.Event()

    async def wait_for_second(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await second_came.wait()
        writer.write(HEAD + b"data: {}\n\ndata: [DONE]\n\n")

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        second_came.set()
        writer.write(HEAD + b"data: {}\n\n")
        await writer.drain()
        writer.write(b"data: [DONE]\n\n")

    requests = [TimedRequest(0.0, 5, 3), TimedRequest(0.0, 6, 1)]
    test, received = asyncio.run(replay([wait_for_second, answer], requests))
    assert [[len(body["prompt"]) for body in bodies] for bodies in received] == [[5], [6]]
    assert received[0][0] | {"prompt": None} == {
        "prompt": None,
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    assert failures(test.measured) == {"failed": 0, "first_error": None}
    for entry in test.measured:
        assert 0 <= entry.sent <= entry.first_token <= entry.end < float("inf")
        assert entry.ttft == entry.first_token and entry.tpot >= 0
    assert test.measured[1].tpot == 0  # it has one token


def test_refused_and_broken_answers_are_failures() -> None:
    async def refuse(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\n\r\nbusy")

    async def break_off(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"data: {}\n\n")

    test, _ = asyncio.run(replay([refuse, break_off], [TimedRequest(0.0, 5, 3), TimedRequest(0.0, 6, 3)]))
    errors = {entry.server: entry.error for entry in test.measured}
    assert errors == {0: "status 429: busy", 1: "the stream ended early"}
    assert failures(test.measured)["failed"] == 2
    assert all(entry.ttft == float("inf") for entry in test.measured)
