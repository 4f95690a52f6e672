"""Requests over sockets that are malformed, slow, cut off or half-closed."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from tests.server.helpers import JSON, NAME, RunningServer, call

BODY = json.dumps({"model": NAME, "prompt": "def", "max_tokens": 30, "ignore_eos": True, "stream": True}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
WHOLE = HEAD % len(BODY) + BODY


async def exchange(url: str, form: int, source: random.Random) -> int | None:
    """The status that the server answers; None if it closes the connection or the client leaves first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        if form == 0:  # no HTTP
            writer.write(source.randbytes(200))
        elif form == 1:  # slow
            for start in range(0, len(WHOLE), 40):
                writer.write(WHOLE[start : start + 40])
                await asyncio.sleep(0.005)
        elif form == 2:  # cut off, and closed in the direction to the server
            writer.write(WHOLE[: source.randrange(1, len(WHOLE))])
            writer.write_eof()
        elif form == 3:  # the client leaves while the answer comes
            writer.write(WHOLE)
            await reader.readline()
            return None
        elif form == 4:  # whole, then closed in the direction to the server
            writer.write(WHOLE)
            await writer.drain()
            writer.write_eof()
        elif form == 5:  # a chunked body that ends early
            writer.write(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nff\r\nabc")
        else:  # a body longer than announced
            writer.write(HEAD % 2 + BODY)
        if form == 5:
            writer.write_eof()
        line = await asyncio.wait_for(reader.readline(), 30)
        await asyncio.wait_for(reader.read(), 30) if form == 2 else None
        return int(line.split()[1]) if line.startswith(b"HTTP/") else None
    except ConnectionError:
        return None
    finally:
        writer.close()


@pytest.mark.parametrize("count", [28, pytest.param(203, marks=pytest.mark.slow)])
def test_odd_connections_leave_nothing_behind(server: RunningServer, count: int) -> None:
    source = random.Random(count)

    async def all_exchanges() -> list[int | None]:
        return await asyncio.gather(*(exchange(server.url, number % 7, source) for number in range(count)))

    statuses = asyncio.run(all_exchanges())
    assert set(statuses[1::7]) == {200}
    assert set(statuses[0::7]) <= {400, None} and set(statuses[6::7]) <= {400, 200}
    server.settle()
    answer = server.run(call(server.app, "POST", "/v1/completions", BODY, JSON))
    assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
    assert server.run(call(server.app, "GET", "/health")).status == 200
