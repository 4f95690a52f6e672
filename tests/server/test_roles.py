"""Engines of several roles: their texts are those of one engine, whatever is lost between them, and no block leaks."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import xxhash

from meshwright.server import prefill_jobs
from meshwright.server.addresses import check_addresses
from meshwright.server.app import admin_app
from meshwright.server.block_store import StoreServer
from meshwright.server.engine_client import EngineRequest, News, Subscription
from meshwright.server.frames import MESSAGE_BYTES, BadFrame, FrameSocket, listen, start_connecting
from meshwright.server.instances import Instances
from meshwright.server.router import ClientConnection
from meshwright.server.router_state import Router
from meshwright.server.staging import Staging, memory_file
from meshwright.server.store_client import StoreClient
from meshwright.server.transfers import TransferFigures
from meshwright.spec.errors import BadInput
from meshwright.spec.route import RouteSpec
from meshwright.spec.serve import ServeSpec
from tests.server.helpers import JSON, Answer, RunningServer, call, running_server
from tests.slow import quick_first

PROMPTS = ["a" * 40, "the quick brown fox jumps over the lazy dog " * 3, "x", "the quick brown fox jumps over it"]
DRAWN = {"n": 2, "temperature": 1.0, "seed": 5, "logprobs": 2, "presence_penalty": 0.5, "stop": "e"}
LONG_PROMPT = {
    "job": 1,
    "tokens": [1 + number % 200 for number in range(150)],
    "count": 1,
    "first_block": 0,
    "sampling": {},
    "stop_ids": [],
    "grammar": None,
    "priority": 0,
    "salt": "",
}
"""A prompt of three steps of at most 64 tokens, as an engine asks its peer to compute it."""


async def completion(server: RunningServer, prompt: str, **options: Any) -> Any:
    body = json.dumps({"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True, **options}).encode()
    answer = await call(server.app, "POST", "/v1/completions", body, JSON)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)["choices"]


async def all_prompts(server: RunningServer, **options: Any) -> list[Any]:
    return await asyncio.gather(*(completion(server, prompt, **options) for prompt in PROMPTS))


def texts(server: RunningServer, **options: Any) -> list[list[str]]:
    return [[choice["text"] for choice in server.run(completion(server, prompt, **options))] for prompt in PROMPTS]


@contextmanager
def engines(
    folder: Path, addresses: Sequence[str], decoders: int = 1, **settings: Any
) -> Iterator[list[RunningServer]]:
    """Servers of the role prefill at `addresses`, and then those of the role decode."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running_server(folder, role="prefill", transfer_address=address, **settings))
            for address in addresses
        ]
        for _ in range(decoders):
            decoder = running_server(folder, role="decode", prefill_engines=",".join(addresses), **settings)
            servers.append(stack.enter_context(decoder))
        yield servers
        for server in servers:
            server.settle()


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> list[list[str]]:
    """The texts of one engine of both roles."""
    return texts(server)


@pytest.mark.parametrize(
    ("senders", "receivers", "options"),
    quick_first(1, [(1, 1, DRAWN), (1, 1, {}), (2, 1, {}), (1, 2, {}), (1, 1, {"max_tokens": 1})], unpack=True),
)
def test_texts_are_those_of_one_engine(
    folder: Path, server: RunningServer, tmp_path: Path, senders: int, receivers: int, options: dict[str, Any]
) -> None:
    whole = [server.run(completion(server, prompt, **options)) for prompt in PROMPTS]
    addresses = [f"unix:{tmp_path}/{number}" for number in range(senders)]
    with engines(folder, addresses, receivers) as servers:
        for decode in servers[senders:]:
            wait_for_peers(decode, senders)
            for found, wanted in zip(decode.run(all_prompts(decode, **options)), whole, strict=True):
                for choice, other in zip(found, wanted, strict=True):
                    assert choice["text"] == other["text"] and choice["finish_reason"] == other["finish_reason"]
                    if "logprobs" in options:
                        ours, theirs = (chosen["logprobs"]["token_logprobs"] for chosen in (choice, other))
                        assert ours == pytest.approx(theirs, abs=1e-4)
            assert figures(decode).received_blocks > 20 and not figures(decode).lost_prompts
        wait_until(lambda: sum(figures(each).sent_blocks - figures(each).received_blocks for each in servers) == 0)
        assert all(figures(prefill).sent_blocks for prefill in servers[:senders])


def test_prompts_are_scored_where_they_are_asked_for(folder: Path, server: RunningServer, tmp_path: Path) -> None:
    """Their logits are needed, so no other engine computes them."""
    with engines(folder, [f"unix:{tmp_path}/0"]) as (_, decode):
        wait_for_peers(decode, 1)
        found, wanted = (
            each.run(completion(each, PROMPTS[1], echo=True, logprobs=2, max_tokens=1)) for each in (decode, server)
        )
        assert found == wanted and len(found[0]["logprobs"]["tokens"]) == len(PROMPTS[1]) + 1
        assert not figures(decode).received_blocks


@pytest.mark.slow
def test_texts_through_a_router_are_those_of_one_engine(
    folder: Path, tmp_path: Path, expected: list[list[str]]
) -> None:
    async def check(urls: Sequence[str]) -> None:
        spec = RouteSpec(instances=tuple(urls), api_key="key")
        router = Router(spec, Instances(urls, spec.requests, spec.health_seconds, spec.silent_seconds))
        await router.instances.look()
        front = await asyncio.get_running_loop().create_server(lambda: ClientConnection(router), "127.0.0.1", 0)
        port = front.sockets[0].getsockname()[1]
        found = await asyncio.gather(*(streamed_text(port, prompt) for prompt in PROMPTS))
        assert [[text] for text in found] == expected
        front.close()

    with engines(folder, [f"unix:{tmp_path}/a"], 2, api_key="key") as servers:
        for decode in servers[1:]:
            wait_for_peers(decode)
        asyncio.run(check([server.url for server in servers]))
        assert all(figures(decode).received_blocks for decode in servers[1:])


async def streamed_text(port: int, prompt: str) -> str:
    """The text of the events of a stream from a port."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    lines = b"host: localhost\r\ncontent-type: application/json\r\nauthorization: Bearer key\r\nconnection: close"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\n%b\r\ncontent-length: %d\r\n\r\n%b" % (lines, len(body), body))
    content = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    events = [json.loads(line[6:]) for line in content.splitlines() if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def test_a_role_changes_while_the_engine_runs(folder: Path, tmp_path: Path, expected: list[list[str]]) -> None:
    addresses = [f"unix:{tmp_path}/{name}" for name in "ab"]
    settings = {"prefill_engines": ",".join(addresses), "admin_key": "admin"}
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(running_server(folder, transfer_address=address, **settings)) for address in addresses
        )
        for prefill, decode in ((first, second), (second, first)):
            change_role(prefill, "prefill")
            change_role(decode, "decode")
            wait_for_peers(decode)
            received = figures(decode).received_blocks
            answer = prefill.run(call(prefill.app, "POST", "/v1/completions", b'{"prompt": "x"}', JSON))
            assert answer.status == 503 and json.loads(answer.body)["error"]["code"] == "role"
            assert decode.run(completion(decode, PROMPTS[1] + prefill.url))
            wait_for_blocks(decode, received)
        change_role(second, "both")
        assert texts(second) == expected
        assert change_role(second, "prefil").status == 400


def test_damaged_blocks_are_computed_again(
    folder: Path, tmp_path: Path, expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    checksums = iter(range(10**6))

    def checksum(content: memoryview) -> str:
        return "0" * 16 if next(checksums) % 5 == 3 else xxhash.xxh3_64_hexdigest(content)

    monkeypatch.setattr(prefill_jobs, "xxhash", SimpleNamespace(xxh3_64_hexdigest=checksum))
    with engines(folder, [f"unix:{tmp_path}/a"]) as (_, decode):
        wait_for_peers(decode)
        assert texts(decode) == expected
        assert figures(decode).damaged_blocks > 1 and figures(decode).received_blocks > 3


@pytest.mark.parametrize(
    "way", quick_first(1, ["closes", "is silent", "gives up", "sends a wrong block", "sends no JSON"])
)
def test_a_prompt_whose_peer_fails_is_computed_here(
    folder: Path, tmp_path: Path, expected: list[list[str]], way: str
) -> None:
    with listen(f"unix:{tmp_path}/a") as listening:
        settings = {"role": "decode", "prefill_engines": f"unix:{tmp_path}/a", "transfer_seconds": 0.3}
        with running_server(folder, **settings) as decode:
            peer = WrongPeer(listening, decode.engine.prefix_blocks().block_bytes)
            wait_for_peers(decode)
            result = asyncio.run_coroutine_threadsafe(completion(decode, PROMPTS[1]), decode.loop)
            peer.fail(way)
            assert [choice["text"] for choice in result.result(60)] == expected[1]
            assert figures(decode).lost_prompts == 1
            decode.settle()
            peer.frames.close()


@pytest.mark.parametrize("way", quick_first(1, ["leaves", "cancels", "acknowledges nothing"]))
def test_a_receiver_that_fails_leaves_no_blocks(folder: Path, tmp_path: Path, way: str) -> None:
    address = f"unix:{tmp_path}/a"
    with running_server(folder, role="prefill", transfer_address=address, transfer_seconds=0.3) as prefill:
        receiver = connected(address, "", prefill.engine.prefix_blocks().identity())
        assert "welcome" in next_message(receiver)
        receiver.send({"prefill": LONG_PROMPT})
        while "blocks" not in next_message(receiver):
            pass
        if way == "leaves":
            receiver.close()
        elif way == "cancels":
            receiver.send({"cancel": 1})
        prefill.settle()
        if way == "acknowledges nothing":
            with pytest.raises(EOFError):
                while next_message(receiver):
                    pass
        assert figures(prefill).sent_blocks > 0
        receiver.close()


def test_blocks_leave_after_each_chunk_of_a_prompt(folder: Path, tmp_path: Path) -> None:
    """150 tokens in steps of at most 64, in blocks of 4: the last block has two tokens."""
    address = f"unix:{tmp_path}/a"
    with running_server(folder, role="prefill", transfer_address=address) as prefill:
        receiver = connected(address, "", prefill.engine.prefix_blocks().identity())
        receiver.send({"prefill": LONG_PROMPT})
        sent: list[tuple[int, int]] = []
        messages: list[dict[str, Any]] = []
        while not any("first" in message for message in messages):
            assert select.select([receiver], [], [], 60)[0]
            messages += [dict(frame.message) for frame in receiver.receive()]
        for message in messages:
            if "blocks" in message:
                sent.append((message["index"], message["slots"][1]))
                receiver.send({"copied": message["slots"]})
        assert sent == [(0, 16), (16, 16), (32, 6)]
        prefill.settle()
        receiver.close()


def test_only_peers_with_the_key_and_the_same_weights_are_served(folder: Path, tmp_path: Path) -> None:
    address = unused_address()
    with engines(folder, [address], transfer_key="right") as (prefill, decode):
        wait_for_peers(decode)
        decode.run(completion(decode, PROMPTS[1]))
        assert figures(decode).received_blocks > 20
        identity = prefill.engine.prefix_blocks().identity()
        for key, weights in (("wrong", identity), ("right", "others")):
            with pytest.raises(EOFError):
                peer = connected(address, key, weights)
                while "welcome" not in next_message(peer):
                    pass
    spec = ServeSpec(role="prefill", transfer_address="127.0.0.1:0")
    with pytest.raises(BadInput, match="needs transfer_key"):
        check_addresses(spec)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["unix:{}/store", "127.0.0.1:{}"])
def test_engines_share_blocks_through_a_store(
    folder: Path, tmp_path: Path, expected: list[list[str]], address: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = address.format(tmp_path if "unix" in address else free.getsockname()[1])
    settings = {"block_cache": address, "transfer_key": "right"}
    with running_store(address) as store, ExitStack() as stack:
        first, second = (stack.enter_context(running_server(folder, **settings)) for _ in range(2))
        wait_until(lambda: figures(first).store_connected and figures(second).store_connected)
        assert texts(first) == expected
        wait_until(lambda: store.store is not None and len(store.store) == figures(first).stored_blocks > 40)
        assert texts(second) == expected
        wait_until(lambda: figures(second).fetched_blocks > 40)
        assert figures(second).stored_blocks < 5 and not figures(second).damaged_blocks
        for server in (first, second):
            server.settle()
        assert store.store is not None
        wait_until(lambda: store.store.read == 0)


@pytest.mark.slow
def test_damaged_blocks_of_a_store_are_computed(folder: Path, tmp_path: Path, expected: list[list[str]]) -> None:
    address = f"unix:{tmp_path}/store"
    with running_store(address, key="") as store:
        with running_server(folder, block_cache=address) as first:
            wait_until(lambda: figures(first).store_connected)
            assert texts(first) == expected
            wait_until(lambda: store.store is not None and len(store.store) == figures(first).stored_blocks > 40)
        for slot in range(0, 40, 4):
            store.store.content(slot)[5] ^= 1
        with running_server(folder, block_cache=address) as second:
            wait_until(lambda: figures(second).store_connected)
            assert texts(second) == expected
            wait_until(lambda: figures(second).damaged_blocks > 0)
            second.settle()


def test_a_store_that_ends_while_it_answers_loses_no_request(
    folder: Path, tmp_path: Path, expected: list[list[str]]
) -> None:
    with (
        listen(f"unix:{tmp_path}/store") as listening,
        running_server(folder, block_cache=f"unix:{tmp_path}/store") as server,
    ):
        size = server.engine.prefix_blocks().block_bytes
        select.select([listening], [], [], 60)
        store, (descriptor, _) = FrameSocket(listening.accept()[0]), memory_file(size)
        assert hello_of(store)["block_bytes"] == size
        store.send({"welcome": 1}, descriptor=descriptor)
        os.close(descriptor)
        wait_until(lambda: figures(server).store_connected)
        result = asyncio.run_coroutine_threadsafe(completion(server, PROMPTS[1]), server.loop)
        number = next_message(store)["get"]
        store.send({"found": number, "slots": [0], "checksums": ["0" * 16]})
        store.close()
        assert [choice["text"] for choice in result.result(60)] == expected[1]
        server.settle()


async def news_of(server: RunningServer, salt: str, priority: int = 0) -> list[News]:
    """The news of a prompt with a salt."""
    subscription = Subscription(whole=True)
    request = EngineRequest(tokens=TOKENS, new_tokens=5, sampling={"temperature": 0.0}, salt=salt, priority=priority)
    server.api.client.submit(request, subscription, 0)
    return await subscription.next()


SALTS = ["", "a", "", "a", "=a", "\udc80\ud800", "a"]
"""Each of these prompts may find those of an equal salt, and no others."""
TOKENS = [1 + number % 200 for number in range(50)]


def test_salts_divide_the_caches_of_both_roles(folder: Path, tmp_path: Path) -> None:
    with engines(folder, [f"unix:{tmp_path}/a"]) as (prefill, decode):
        wait_for_peers(decode)
        texts, moved, cached = [], [], []
        for salt in SALTS:
            news = decode.run(news_of(decode, salt, priority=len(texts)))
            texts.append([token for one in news for token in one.tokens])
            cached.append([one.cached_tokens for one in news][:2])
            moved.append(figures(decode).received_blocks)
        new = [salt not in SALTS[:index] for index, salt in enumerate(SALTS)]
        assert [after - before for before, after in pairwise([0, *moved])] == [13 if first else 0 for first in new]
        assert all(text == texts[0] for text in texts) and not figures(decode).lost_prompts
        for server in (prefill, decode):
            (pool,) = server.engine._policy.cache.pools
            assert len(pool.block_of) >= 12 * len(set(SALTS))
        assert prefill.engine._policy.cached_tokens == 0, "a prompt found blocks of another salt"
        assert cached == [[0, 0] if first else [48, 0] for first in new], "what was cached before the request"


def test_salts_divide_a_store(folder: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/store"
    with running_store(address, key="") as store:
        with running_server(folder, block_cache=address) as first:
            wait_until(lambda: figures(first).store_connected)
            for count, salt in enumerate(["", "a"], 1):
                first.run(news_of(first, salt))
                wait_until(lambda count=count: store.store is not None and len(store.store) == 12 * count)
        with running_server(folder, block_cache=address) as second:
            wait_until(lambda: figures(second).store_connected)
            for fetched, salt in ((12, "a"), (12, "b"), (12, "a"), (24, "")):
                second.run(news_of(second, salt))
                wait_until(lambda fetched=fetched: figures(second).fetched_blocks == fetched)
            wait_until(lambda: store.store is not None and len(store.store) == 36)


@pytest.mark.parametrize("lost", [False, True])
def test_a_prompt_that_began_without_the_store_is_stored(folder: Path, tmp_path: Path, lost: bool) -> None:
    """The store answers for the first time, or again, before the prompt has been computed."""
    address = f"unix:{tmp_path}/store"
    with running_server(folder) as server, running_store(address, key="") as store:
        blocks = server.engine.prefix_blocks()
        client = StoreClient(blocks, address, "")
        client.use_identity(blocks.identity())
        if lost:
            connect(client)
        client.publish(3, TOKENS, "")
        if lost:
            client._lose(retry=0.0)
        server.run(news_of(server, ""))
        connect(client)
        client.after_step([cast("Any", SimpleNamespace(number=3, reason=None))])
        wait_until(lambda: store.store is not None and len(store.store) == client.stored_blocks == 12)
        client.close()
        server.settle()


def connect(client: StoreClient) -> None:
    """Connect an engine's client to its store, as the engine does between two steps."""
    while not client.usable:
        client.tick(time.monotonic())
        if client.frames is not None:
            select.select([client.frames], [], [], 1.0)
            client.serve(readable=True)


@contextmanager
def running_store(address: str, key: str = "right") -> Iterator[StoreServer]:
    """A store in a thread."""
    store, stop = StoreServer(listen(address), key, 1 << 22), threading.Event()

    def run() -> None:
        while not stop.is_set():
            store.step(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield store
    finally:
        stop.set()
        thread.join()
        store.close()


def figures(server: RunningServer) -> TransferFigures:
    return server.api.client.transfers or TransferFigures()


def wait_for_peers(server: RunningServer, count: int = 1) -> None:
    wait_until(lambda: figures(server).usable_peers == count)


def wait_for_blocks(server: RunningServer, earlier: int) -> None:
    """Wait until the server's figures, which come behind its tokens, have more blocks than `earlier`."""
    wait_until(lambda: figures(server).received_blocks > earlier)


def change_role(server: RunningServer, role: str) -> Answer:
    headers = [*JSON, (b"authorization", b"Bearer admin")]
    return server.run(call(admin_app(server.api), "POST", "/role", json.dumps({"role": role}).encode(), headers))


def connected(address: str, key: str, identity: str, host: str = "") -> FrameSocket:
    end = start_connecting(address)
    assert end is not None
    select.select([], [end], [], 60)
    frames = FrameSocket(end)
    frames.limit = MESSAGE_BYTES
    frames.introduce(key)
    hello = {"identity": identity, "host": host}
    try:
        assert frames.proves(next_message(frames))
        frames.say_hello(hello)
    except BadFrame:  # the other side has another key
        frames.send({"hello": {**hello, "proof": "0" * 64}})
    return frames


def hello_of(frames: FrameSocket) -> dict[str, Any]:
    """The hello of an engine that connects, as the listening side without a key."""
    assert frames.take_hello(next_message(frames), "") is None
    hello = frames.take_hello(next_message(frames), "")
    assert hello is not None
    return hello


def unused_address() -> str:
    """A port of this machine that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def next_message(frames: FrameSocket) -> dict[str, Any]:
    """All keys of the messages that arrive next. Raises EOFError at the end."""
    while True:
        assert select.select([frames], [], [], 60)[0]
        if messages := frames.receive():
            return {key: value for frame in messages for key, value in frame.message.items()}


class WrongPeer:
    """An engine of the role prefill that takes a prompt and fails."""

    def __init__(self, listening: socket.socket, block_bytes: int) -> None:
        select.select([listening], [], [], 60)
        self.frames, self.staging = FrameSocket(listening.accept()[0]), Staging(block_bytes)
        hello_of(self.frames)
        sizes = {"block_bytes": block_bytes, "slots": self.staging.slots}
        self.frames.send({"welcome": sizes}, descriptor=self.staging.descriptor)
        self.frames.send({"load": 0, "accepting": True})

    def fail(self, way: str) -> None:
        """Wait for the prompt, and then do the wrong thing."""
        number = next_message(self.frames)["prefill"]["job"]
        if way == "closes":
            self.frames.close()
        elif way == "gives up":
            self.frames.send({"failed": number, "error": "for a reason"})
        elif way == "sends a wrong block":
            checksum = xxhash.xxh3_64_hexdigest(bytes(self.staging.block_bytes))
            self.frames.send({"blocks": number, "index": 10**6, "slots": [0, 1], "checksums": [checksum]})
        elif way == "sends no JSON":
            self.frames._outgoing.append(memoryview(b"\0\0\0\1\0\0\0\0{"))
            self.frames.flush()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
