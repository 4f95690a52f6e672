"""The router in front of servers that answer by a script: bytes pass unchanged, and what fails goes elsewhere."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import socket
from dataclasses import replace
from typing import Any

import pytest

from meshwright.connections.limits import ROUTE
from meshwright.server.addresses import listening_socket
from meshwright.server.instances import PREFIX_BYTES, Instances, target_of
from meshwright.server.response_frames import BadAnswer, ResponseFrames
from meshwright.server.router import MOST_AHEAD_BYTES
from meshwright.spec.errors import BadInput
from tests.server.scripted import (
    BUSY,
    EVENTS,
    FULL,
    LAST,
    OPENING,
    STREAM,
    WHOLE,
    Clock,
    Server,
    assert_lost,
    exchange,
    request,
    routed,
    wait_for,
)
from tests.slow import examples


def test_bytes_pass_unchanged_and_connections_are_used_again() -> None:
    async def check() -> None:
        server = Server(STREAM)
        async with routed(server) as (router, port):
            first, last = request(b'{"a": 1}'), request(b'{"b": 2}', b"/v1/chat/completions", LAST)
            assert await exchange(port, first, last, sizes=[5, 60, 9]) == STREAM * 2
            assert server.connections == 1 and server.bodies == [b'{"a": 1}', b'{"b": 2}']
            assert b"".join(server.heads) == (first + last).replace(b'{"a": 1}', b"").replace(b'{"b": 2}', b"")
            assert router.unfinished == 0
            text = await exchange(port, b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b'meshwright_router:statuses_total{status="200"} 2' in text
            assert re.search(rb"meshwright_router:healthy{[^}]+} 1\n", text), text
            assert (await exchange(port, b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200")

    asyncio.run(check())


@pytest.mark.parametrize("wrong", [Server(BUSY), Server(FULL), Server(b"", ends=True), Server(b"no HTTP\r\n\r\n")])
def test_what_a_server_does_not_answer_another_does(wrong: Server) -> None:
    async def check() -> None:
        right = Server(STREAM)
        async with routed(wrong, right) as (router, port):
            for _ in range(4):
                assert await exchange(port, request(b"{}", b"/v1/completions", LAST)) == STREAM
            assert wrong.bodies and len(right.bodies) == 4 and router.retries == len(wrong.bodies)

    asyncio.run(check())


def test_a_client_learns_that_no_server_can_answer() -> None:
    async def check() -> None:
        server = Server(WHOLE, hold=asyncio.Event())
        async with routed(server, requests=1) as (_, port):
            running = asyncio.ensure_future(exchange(port, request(b"{}", b"/x", LAST)))
            while not server.bodies:
                await asyncio.sleep(0.001)
            refused = await exchange(port, request(b"{}", b"/x", LAST))
            assert refused.startswith(b"HTTP/1.1 429") and b"retry-after: 1" in refused
            assert server.hold is not None
            server.hold.set()
            assert await running == WHOLE
        async with routed(Server()) as (router, port):
            with socket.socket() as silent:  # without a listener
                silent.bind(("127.0.0.1", 0))
                for instance in router.instances.all.values():
                    instance.port = silent.getsockname()[1]
                refused = await exchange(port, request(b"{}", b"/x", LAST))
                assert refused.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in refused and b"no_server" in refused
                await router.instances.look()
                assert (await exchange(port, request(b"{}", b"/x", LAST))).startswith(b"HTTP/1.1 503")
                assert (await exchange(port, b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 503")

    asyncio.run(check())


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (b"/v1/completions", b'data: {"error": {"message": "the server was lost; try again"'),
        (b"/v1/responses", b'event: response.failed\ndata: {"type": "response.failed", "response": {'),
        (b"/v1/messages?beta=true", b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error"'),
    ],
)
def test_a_stream_whose_server_is_lost_ends_with_an_error(path: bytes, event: bytes) -> None:
    async def check() -> None:
        begun = STREAM[: -len(b"0\r\n\r\n")]
        async with routed(Server(begun, ends=True)) as (router, port):
            content = await exchange(port, request(path=path))
            assert content.startswith(begun) and content.endswith(b"\n\n\r\n0\r\n\r\n")
            assert event in content and router.broken == 1
        async with routed(Server(begun[:-3], ends=True)) as (router, port):
            assert await exchange(port, request()) == begun[:-3]

    asyncio.run(check())


WRONG_HEALTH = [b"", b"no HTTP", b"HTTP/1.1 500 x\r\n\r\n{}", b"HTTP/1.1 200 OK\r\n\r\n[]}"]


@pytest.mark.parametrize("wrong", WRONG_HEALTH)
def test_a_server_that_misses_checks_keeps_what_it_still_delivers(wrong: bytes) -> None:
    """A missed check stops new requests; silence and a second one give up those that run."""

    async def check() -> None:
        clock, busy, other = Clock(), Server(opening=OPENING, hold=asyncio.Event()), Server(WHOLE)
        async with routed(busy, other, silent_seconds=5, clock=clock) as (router, port):
            instances = {instance.port: instance for instance in router.instances.all.values()}
            instances[other.port].answered = 1  # so that the first request goes to the busy one
            running = asyncio.ensure_future(exchange(port, request(b"{}", b"/x", LAST)))
            await wait_for(lambda: instances[busy.port].answered == 1)
            busy.health = wrong
            chunk, sent = b"%x\r\n%b\r\n" % (len(EVENTS[0]), EVENTS[0]), OPENING
            for _ in range(4):  # however many checks it misses
                clock.now += 60
                busy.writers[0].write(chunk)
                sent += chunk
                await wait_for(lambda: instances[busy.port].heard == clock.now)
                await router.instances.look()
                assert await exchange(port, request(b"{}", b"/x", LAST)) == WHOLE and not running.done()
            assert len(busy.bodies) == 1
            clock.now += 4.9
            await router.instances.look()
            assert instances[busy.port].busy and not running.done()
            clock.now += 0.1
            await router.instances.look()
            content = await running
            assert content.startswith(sent) and b"server_lost" in content and router.broken == 1
            await asyncio.wait_for(busy.left.wait(), 60)
            busy.health = None
            await router.instances.look()
            assert instances[busy.port].usable

    asyncio.run(check())


def test_a_silent_server_loses_its_requests_without_a_first_byte_to_another() -> None:
    async def check() -> None:
        clock, silent, other = Clock(), Server(hold=asyncio.Event()), Server(STREAM)
        async with routed(silent, other, clock=clock) as (router, port):
            {instance.port: instance for instance in router.instances.all.values()}[other.port].answered = 1
            running = asyncio.ensure_future(exchange(port, request(b"{}", b"/x", LAST)))
            await wait_for(lambda: bool(silent.bodies))
            silent.health = b""
            clock.now += 60
            await router.instances.look()
            assert not running.done() and not other.bodies
            await router.instances.look()
            assert await running == STREAM
            await asyncio.wait_for(silent.left.wait(), 60)

    asyncio.run(check())


def test_a_server_whose_address_is_gone_ends_what_it_has() -> None:
    async def check() -> None:
        server = Server(opening=OPENING, hold=asyncio.Event(), answer=STREAM[len(OPENING) :])
        async with routed(server) as (router, port):
            running = asyncio.ensure_future(exchange(port, request(b"{}", b"/x", LAST)))
            await wait_for(lambda: bool(server.writers))
            router.instances._addresses.clear()
            router.instances._targets.clear()
            await router.instances.look()
            assert b"no_server" in await exchange(port, request(b"{}", b"/x", LAST))
            assert server.hold is not None
            server.hold.set()
            assert await running == STREAM
            await router.instances.look()
            assert not router.instances.all

    asyncio.run(check())


def test_texts_go_to_servers_of_their_role_and_prefixes_to_the_same_one() -> None:
    async def check() -> None:
        prefill, first, second = Server(role="prefill"), Server(role="both"), Server()
        async with routed(prefill, first, second) as (router, port):
            prompts = [bytes([97 + number]) * 3 * PREFIX_BYTES for number in range(6)]
            for end in range(3):
                for prompt in prompts:
                    body = b'{"stream": true, "prompt": "%b%d"}' % (prompt, end)
                    assert await exchange(port, request(body, b"/v1/completions", LAST)) == WHOLE
            assert not prefill.bodies and len(first.bodies) + len(second.bodies) == 18
            for prompt in prompts:
                counts = [sum(prompt in body for body in server.bodies) for server in (first, second)]
                assert sorted(counts) == [0, 3]
            assert len(first.bodies) == len(second.bodies)
            prefill.role, first.role, second.role = "both", "prefill", "prefill"
            await router.instances.look()
            assert await exchange(port, request(b"{}", b"/v1/completions", LAST)) == WHOLE
            assert len(prefill.bodies) == 1

    asyncio.run(check())


def test_a_busy_server_gives_its_prefix_up() -> None:
    instances = Instances(["http://127.0.0.1:1", "http://127.0.0.1:2"], 100, 1, 1)

    async def look() -> None:
        await instances.look()

    asyncio.run(look())
    for instance in instances.all.values():
        instance.healthy = True
    body = b'{"prompt": "%b"}' % (b"x" * 128 * PREFIX_BYTES)  # 8,192 tokens, as many as four requests count
    first = instances.choose(body)
    assert first is not None
    chosen = []
    for _ in range(20):
        instance = instances.choose(body)
        assert instance is not None
        instance.requests += 1
        chosen.append(instance)
    assert chosen[:4] == [first] * 4 and 4 <= chosen.count(first) <= 16


def test_a_client_that_leaves_ends_its_request() -> None:
    async def check() -> None:
        server = Server(hold=asyncio.Event())
        async with routed(server) as (router, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request())
            await wait_for(lambda: bool(server.bodies))
            writer.close()
            await asyncio.wait_for(server.left.wait(), 60)
            assert router.unfinished == 0 and all(not each.requests for each in router.instances.all.values())

    asyncio.run(check())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"no HTTP\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400),
        (b"POST /x HTTP/1.1\r\ncontent-length: +2\r\n\r\n{}", 400),
        (b"POST /x HTTP/1.1\r\ncontent-length : 2\r\n\r\n{}", 400),
        (b"POST /x HTTP/1.1\r\ncontent-length: %b2\r\n\r\n{}" % (b"0" * 20), 400),
        (b"POST /x\n HTTP/1.1\r\n\r\n", 400),
        (b"POST /\0 HTTP/1.1\r\n\r\n", 400),
        (b"PO\rST / HTTP/1.1\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\ncontent-length: 999\r\n\r\n", 401),
        (b"POST /x HTTP/1.1\r\na: b\n c\r\n\r\n{}", 400),
        (b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n{}", 400),
        (b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\nauthorization: Bearer right\r\n\r\n2\r\n{}}\r\n", 400),
        (b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\nauthorization: Bearer right\r\n\r\n3e9\r\n", 413),
        (b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", 401),
        (b"POST /health HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}", 405),
        (b"OPTIONS /health HTTP/1.0\r\n\r\n", 405),
        (b"GET /health HTTP/1.1\r\ncontent-length: 1000\r\n\r\n", 413),
        (b"GET /health HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", 413),
        (b"POST /x HTTP/1.1\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000, 400),
        (request(b"{}", b"/x", LAST), 401),
        (request(b"{}", b"/x", LAST, b"authorization: Bearer wrong"), 401),
        (request(b"{}", b"/x", LAST, b"authorization: Bearer right"), 200),
    ],
)
def test_wrong_requests_are_refused(sent: bytes, status: int) -> None:
    async def check() -> None:
        server = Server()
        async with routed(server, max_body_bytes=1000, api_key="right") as (_, port):
            content = await exchange(port, sent)
            assert content.startswith(b"HTTP/1.1 %d" % status) and (b"allow: GET, HEAD\r\n" in content) == (
                status == 405
            )
            assert len(server.bodies) == (status == 200)

    asyncio.run(check())


def test_the_end_of_an_answer_is_found_however_its_bytes_are_split() -> None:
    source = random.Random(1)
    for _ in range(examples(50, 2000)):
        chunks = [source.randbytes(source.randrange(1, 40)) for _ in range(source.randrange(4))]
        chunked = (
            OPENING + b"".join(b"%X;a=b\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nx: y\r\n\r\n"
        )
        body = b"".join(chunks)
        for answer in (chunked, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)):
            frames, left = ResponseFrames(), answer
            while left:
                assert not frames.complete
                size = source.randrange(1, 30)
                frames.add(left[:size])
                left = left[size:]
            assert frames.complete and frames.keeps_open and frames.status == 200
            with pytest.raises(BadAnswer):
                frames.add(b"x")


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified", b"200 OK"])
def test_answers_without_content_end_with_their_head(status: bytes) -> None:
    answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nx: y\r\n\r\nHTTP/1.1 %b\r\n" % status
    answer += b"content-length: 5\r\n\r\n"

    async def check() -> None:
        server = Server(answer)
        async with routed(server) as (_, port):
            method = b"HEAD" if status == b"200 OK" else b"GET"
            sent = method + b" /x HTTP/1.1\r\n"
            assert await exchange(port, sent + b"\r\n", sent + b"connection: close\r\n\r\n") == answer * 2
            assert server.connections == 1
            head, _, content = (await exchange(port, b"HEAD /health HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
            assert b"content-length: 19" in head and not content

    asyncio.run(check())


def test_bodies_in_chunks_get_a_length() -> None:
    async def check() -> None:
        server = Server(STREAM)
        async with routed(server) as (_, port):
            head = b"POST /x HTTP/1.1\r\nhost: localhost\r\nTransfer-Encoding: Chunked\r\nx-a: b\r\nexpect: 100-continue\r\n\r\n"
            body = b'{"prompt": "%b"}' % (b"x" * 5000)
            chunks = b"".join(b"%X\r\n%b\r\n" % (len(part), part) for part in (body[:1], body[1:3000], body[3000:]))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(chunks + b"0\r\n\r\n" + request(b"{}", b"/y", LAST))
            assert await asyncio.wait_for(reader.read(), 60) == STREAM * 2
            writer.close()
            assert server.bodies == [body, b"{}"]
            assert server.heads[
                0
            ] == b"POST /x HTTP/1.1\r\nhost: localhost\r\nx-a: b\r\ncontent-length: %d\r\n\r\n" % len(body)

    asyncio.run(check())


def test_ids_of_requests_pass_and_are_those_of_own_answers(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        given = b"x-request-id: a-1"
        async with routed(Server(WHOLE)) as (router, port):
            (server,) = router.instances.all.values()
            assert given in request(b"{}", b"/x", given)
            assert await exchange(port, request(b"{}", b"/x", given, LAST)) == WHOLE
            health = b"GET /health HTTP/1.0\r\n%b\r\n\r\n"
            assert given + b"\r\n" in await exchange(port, health % given)
            assert b"x-request-id: r" in await exchange(port, health % b"x-request-id: a b")
            server.healthy = False
            assert given in await exchange(port, request(b"{}", b"/x\x1b", given, LAST))

    with caplog.at_level(logging.INFO, "meshwright.server"):
        asyncio.run(check())
    ends = [record.message for record in caplog.records if record.name == "meshwright.server"]
    assert ends[-1] == r"request a-1: /x\x1b: 503"


def test_a_request_that_ends_servers_does_not_reach_them_all() -> None:
    refusal = b'{"error": {"code": "engine_failed"}}'
    failed = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n%b" % (len(refusal), refusal)

    async def check(count: int, **settings: Any) -> bytes:
        servers = [Server(**settings) for _ in range(4)]
        async with routed(*servers) as (_, port):
            content = await exchange(port, request(b"{}", b"/x", LAST))
            assert sum(len(server.bodies) for server in servers) == count
            return content

    assert asyncio.run(check(1, answer=failed)) == failed
    assert_lost(asyncio.run(check(2, answer=b"", ends=True)))


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    count, sent = 1000, b"GET /health HTTP/1.1\r\n\r\n"

    async def check() -> None:
        async with routed(Server()) as (router, port):
            end = socket.socket()
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            end.connect(("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(sock=end)
            writer.transport.pause_reading()
            await wait_for(lambda: bool(router.clients))
            (client,) = router.clients
            client.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
            while not client.paused:
                writer.write(sent * 200)
                await asyncio.sleep(0.001)
            written = router.statuses[200]
            writer.write(sent * count)
            await asyncio.sleep(0.01)
            assert router.statuses[200] == written and client.transport.get_write_buffer_size() < 1 << 18
            writer.transport.resume_reading()
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            content = await asyncio.wait_for(reader.read(), 60)
            assert content.count(b"HTTP/1.1 200") == router.statuses[200] > written + count

    asyncio.run(check())


def test_a_client_that_never_reads_its_answer_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.server.router.IDLE_SECONDS", 0.1)

    async def check() -> None:
        chunk = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"
        server = Server(opening=OPENING + chunk * 400, hold=asyncio.Event())
        async with routed(server) as (router, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.transport.pause_reading()
            writer.write(request())
            await wait_for(lambda: any(client.paused for client in router.clients))
            await wait_for(lambda: not router.clients)
            assert not any(instance.requests for instance in router.instances.all.values())
            writer.close()

    asyncio.run(check())


def test_clients_that_never_read_do_not_keep_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.server.router.UNREAD_SECONDS", 0.05)

    async def check() -> None:
        chunk = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"
        server = Server(opening=OPENING + chunk * 400, hold=asyncio.Event())
        async with routed(server, requests=3) as (router, port):
            writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(3)]
            for writer in writers:
                writer.transport.pause_reading()
                writer.write(request())
            await wait_for(lambda: len(router.unread) == 3)
            refused = await exchange(port, request(b"{}", b"/x", LAST))
            await asyncio.sleep(0.1)
            server.opening, server.answer, server.hold = b"", WHOLE, None
            assert await exchange(port, request(b"{}", b"/x", LAST)) == WHOLE
            assert refused.startswith(b"HTTP/1.1 429") and len(router.unread) == 2
            for writer in writers:
                writer.close()

    asyncio.run(check())


def test_little_is_read_behind_a_request() -> None:
    async def check() -> None:
        server = Server(WHOLE, hold=asyncio.Event())
        async with routed(server) as (router, port):
            body, count = b"x" * 2000, 300
            sent = asyncio.ensure_future(exchange(port, *[request(body)] * count, request(body, b"/x", LAST)))
            await wait_for(lambda: any(len(client._reader) > MOST_AHEAD_BYTES for client in router.clients))
            (client,) = router.clients
            held = len(client._reader)
            await asyncio.sleep(0.01)
            assert len(client._reader) == held < 1 << 19
            assert server.hold is not None
            server.hold.set()
            assert await sent == WHOLE * (count + 1)

    asyncio.run(check())


def test_clients_that_send_nothing_or_are_too_many_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.server.router_state.ROUTE", replace(ROUTE, connections=2))
    monkeypatch.setattr("meshwright.server.router.IDLE_SECONDS", 0.1)

    async def ends(port: int, sent: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        try:
            return await asyncio.wait_for(reader.read(), 60)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def check() -> None:
        server = Server(WHOLE, hold=asyncio.Event())
        async with routed(server) as (router, port):
            busy = [asyncio.ensure_future(ends(port, request())) for _ in range(2)]
            await wait_for(lambda: len(server.bodies) == 2)
            assert await ends(port, request()) == b"", "all clients have requests"
            assert server.hold is not None
            server.hold.set()
            assert await asyncio.gather(*busy) == [WHOLE, WHOLE] and not router.clients
            idle = [asyncio.ensure_future(ends(port, b"")) for _ in range(2)]
            await wait_for(lambda: len(router.clients) == 2)
            assert await ends(port, request(b"{}", b"/x", LAST)) == WHOLE, "the one that is idle longest makes room"
            assert await asyncio.gather(*idle) == [b"", b""]

    asyncio.run(check())


def test_a_name_that_is_not_found_keeps_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"a": "127.0.0.1", "b": "127.0.0.2"}

    async def look_up(host: str, port: int, **_: Any) -> list[Any]:
        if host not in names:
            raise OSError
        return [(0, 0, 0, "", (names[host], port))]

    async def check() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        instances = Instances(["http://a:1", "http://b:1", "http://c:1"], 1, 1, 1)
        await instances._refresh()
        assert set(instances.all) == {("127.0.0.1", 1), ("127.0.0.2", 1)}
        del names["a"]
        names["b"] = "127.0.0.3"
        await instances._refresh()
        assert set(instances.all) == {("127.0.0.1", 1), ("127.0.0.3", 1)}

    asyncio.run(check())


@pytest.mark.parametrize(
    "answer", [b"\r\n\r\n{}", b"HTTP/1.1 200 OK\r\n\r\n" + b'{"a":' * 9999 + b"}", b"x\r\n\r\n[]}"]
)
def test_a_wrong_answer_about_health_is_that_of_an_unhealthy_server(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def check() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as end:
            instances = Instances([f"http://127.0.0.1:{end.sockets[0].getsockname()[1]}"], 1, 1, 1)
            await instances._refresh()
            (instance,) = instances.all.values()
            instance.healthy = True
            await instances.look()
            assert not instance.healthy

    asyncio.run(check())


def test_a_router_starts_beside_a_server_that_is_stuck() -> None:
    async def check() -> None:
        asked = asyncio.Event()

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await reader.read()
            writer.close()

        async with (
            await asyncio.start_server(Server().serve, "127.0.0.1", 0) as healthy,
            await asyncio.start_server(say_nothing, "127.0.0.1", 0) as stuck,
        ):
            names = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in (stuck, healthy)]
            instances = Instances([f"http://{name}" for name in names], 1, 600, 600)
            watching = asyncio.ensure_future(instances.watch())
            await asyncio.wait_for(asyncio.gather(asked.wait(), instances.known.wait()), 60)
            assert [each.name for each in instances.usable] == names[1:]
            watching.cancel()

    asyncio.run(check())


def test_a_port_that_routers_share_is_served_by_those_that_are_left() -> None:
    first = listening_socket("127.0.0.1", 0, "port", shared=True)
    port = first.getsockname()[1]
    with first, listening_socket("127.0.0.1", port, "port", shared=True) as second:
        first.listen()
        second.listen()
        with pytest.raises(BadInput, match="cannot listen"):
            listening_socket("127.0.0.1", port, "port")
        first.close()
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port), 60):
                second.accept()[0].close()


def test_addresses_are_urls_of_hosts() -> None:
    assert target_of("http://[::1]:80/") == ("::1", 80)
    for url in ("127.0.0.1:80", "https://a:80", "http://a", "http://a:b", "http://a:80/v1"):
        with pytest.raises(BadInput, match="expected http://HOST:PORT"):
            target_of(url)
