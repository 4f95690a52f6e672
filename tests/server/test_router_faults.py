"""A request that harms the servers that get it, behind a router: two are harmed at most, and other streams go on."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from meshwright.server.instances import ServerInstance
from tests.server.scripted import LAST, OPENING, Clock, Server, assert_lost, exchange, request, routed, wait_for
from tests.slow import examples

POISON = b'{"prompt": "poison"}'
REFUSALS = {"full": (429, b"{}"), "drain": (503, b"{}"), "fail": (503, b'{"error": {"code": "engine_failed"}}')}
HARMS = ("restart", "die", "hang", *REFUSALS)
"""Effects of the poisonous request: the process ends, with or without another at its port; it hangs; it refuses."""
CHUNK = b"5\r\nevent\r\n"


@dataclass
class Victim:
    """A server with one stream, and what the poisonous request does to it."""

    harm: str
    deaf: bool
    """Whether it misses all checks once its stream runs, while it goes on to deliver."""
    port: int = 0
    listening: asyncio.Server | None = None
    open: list[asyncio.StreamWriter] = field(default_factory=list)
    stream: asyncio.StreamWriter | None = None
    poisoned: int = 0
    harmed: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0))
                if b"GET /health" in head:
                    silent = (self.deaf and self.stream is not None) or (self.harmed and self.harm == "hang")
                    writer.write(b"" if silent else b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                    return
                if body == POISON:
                    self.take_poison(writer)
                else:
                    self.stream = writer
                    writer.write(OPENING)
        except (EOFError, ConnectionError):
            return
        finally:
            writer.close()

    def take_poison(self, writer: asyncio.StreamWriter) -> None:
        self.poisoned += 1
        if refusal := REFUSALS.get(self.harm):
            writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (refusal[0], len(refusal[1]), refusal[1]))
            return
        self.harmed = True
        if self.harm == "die" and self.listening is not None:
            self.listening.close()
        if self.harm != "hang":
            for each in self.open:
                each.transport.abort()

    def deliver(self) -> None:
        """Send the next piece of the stream, unless it has stopped."""
        if self.stream is not None and not self.harmed:
            self.stream.write(CHUNK)


def heard(instance: ServerInstance, clock: Clock) -> bool:
    """Whether the router has read what the server has sent."""
    return instance.heard == clock.now or not instance.busy


async def poison(harms: list[str], deaf: list[bool]) -> tuple[list[Victim], bytes]:
    """Send a poisonous request to servers of which each has a stream; the servers, and its answer."""
    clock, victims = Clock(), [Victim(harm, misses) for harm, misses in zip(harms, deaf, strict=True)]
    async with routed(*victims, clock=clock) as (router, port):
        instances = {instance.port: instance for instance in router.instances.all.values()}
        streams = [asyncio.ensure_future(exchange(port, request(b"{}", b"/x", LAST))) for _ in victims]
        await wait_for(lambda: all(victim.stream is not None for victim in victims))
        await wait_for(lambda: all(instance.answered for instance in instances.values()))
        poisonous = asyncio.ensure_future(exchange(port, request(POISON, b"/x", LAST)))
        while not poisonous.done():
            clock.now += 60
            for victim in victims:
                victim.deliver()
            await wait_for(lambda: all(victim.harmed or heard(instances[victim.port], clock) for victim in victims))
            await router.instances.look()
        for victim in victims:
            if not victim.harmed and victim.stream is not None:
                victim.stream.write(b"0\r\n\r\n")
        answers = await asyncio.gather(*streams)
        whole = [answer for answer in answers if answer.startswith(OPENING) and answer.endswith(CHUNK + b"0\r\n\r\n")]
        assert len(whole) == sum(not victim.harmed for victim in victims)
        assert not router.unfinished
        return victims, await poisonous


@pytest.mark.parametrize("number", range(examples(12, 400)))
def test_a_poisonous_request_harms_two_servers_at_most(number: int) -> None:
    source = random.Random(number)
    count = source.randint(2, 5)
    harms = [source.choice(HARMS) for _ in range(count)]
    deaf = [source.random() < 0.3 for _ in range(count)]
    victims, answer = asyncio.run(poison(harms, deaf))
    lost = [victim for victim in victims if victim.harmed]
    failed = [victim for victim in victims if victim.harm == "fail" and victim.poisoned]
    assert len(lost) + len(failed) <= 2 and sum(victim.poisoned for victim in lost) <= 2
    if lost:
        assert_lost(answer)
    elif failed:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "engine_failed"
    else:
        assert answer.startswith((b"HTTP/1.1 503", b"HTTP/1.1 429")) and b"x-should-retry" not in answer


@pytest.mark.parametrize("harm", ["restart", "die", "hang"])
def test_a_request_whose_servers_are_lost_goes_to_one_other(harm: str) -> None:
    victims, answer = asyncio.run(poison([harm] * 4, [False] * 4))
    assert sum(victim.harmed for victim in victims) == 2
    assert_lost(answer)


def test_a_late_request_is_not_sent_again() -> None:
    """It may be what makes servers slow, and a client that sends it again makes the next one slow."""

    async def check() -> None:
        servers = [Server(hold=asyncio.Event()) for _ in range(2)]
        async with routed(*servers, first_seconds=0.05) as (router, port):
            content = (await exchange(port, request(b"{}", b"/x", LAST))).lower()
            assert content.startswith(b"http/1.1 503") and b'"late"' in content
            assert b"x-should-retry: false\r\n" in content and b"retry-after" not in content
            assert sum(len(server.bodies) for server in servers) == 1 and not router.retries

    asyncio.run(check())


def test_connections_that_a_server_has_closed_while_idle_are_no_loss() -> None:
    """All of them may be closed just when a request is sent on one: it is sent again on a new connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"GET /health" not in head:
            await reader.readexactly(2)
            waiting.append(asyncio.Event())
            await waiting[-1].wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        with suppress(EOFError):
            await reader.readexactly(1)  # the next request
        writer.close()

    async def check() -> None:
        async with routed() as (router, port), await asyncio.start_server(serve, "127.0.0.1", 0) as end:
            router.instances._targets.append(("127.0.0.1", end.sockets[0].getsockname()[1]))
            await router.instances.look()
            (instance,) = router.instances.all.values()
            asked = [asyncio.ensure_future(exchange(port, request(b"{}", b"/x", LAST))) for _ in range(3)]
            await wait_for(lambda: len(waiting) == 3)
            for each in waiting:
                each.set()
            await asyncio.gather(*asked)
            assert len(instance.idle) == 3
            last = asyncio.ensure_future(exchange(port, request(b"{}", b"/x", LAST)))
            await wait_for(lambda: len(waiting) == 4)
            waiting[-1].set()
            assert (await last).startswith(b"HTTP/1.1 200") and router.retries == 1

    waiting: list[asyncio.Event] = []
    asyncio.run(check())


def test_openais_client_does_not_send_a_request_again_that_may_have_ended_servers() -> None:
    openai = pytest.importorskip("openai")

    def ask(port: int) -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key", max_retries=2) as client:
            client.completions.create(model="model", prompt="poison")

    async def check() -> None:
        servers = [Server(b"", ends=True) for _ in range(4)]
        async with routed(*servers) as (_, port):
            with pytest.raises(openai.APIStatusError) as caught:
                await asyncio.to_thread(ask, port)
            assert caught.value.code == "server_lost" and sum(len(server.bodies) for server in servers) == 2

    asyncio.run(check())
