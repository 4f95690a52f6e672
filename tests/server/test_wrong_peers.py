"""Peers that send something wrong, are stuck or leave: they end their own connection, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.connections.limits import TRANSFERS
from meshwright.connections.proof import answer_challenge
from meshwright.policies.batch_request import BatchLimits
from meshwright.serve.failures import FAILED_STEPS, EngineLost
from meshwright.serve.generation import Update
from meshwright.server import prefill_jobs, store_client
from meshwright.server.engine_process import EngineConnection, EngineLoop
from meshwright.server.frames import BadFrame, FrameSocket, listen
from meshwright.server.prefill_jobs import MOST_SEQUENCES, PrefillConnection, PrefillJobs
from meshwright.server.remote_prefill import SHARED_KEYS
from meshwright.server.staging import Staging
from meshwright.server.store_client import Fetch, StoreClient
from meshwright.server.transfers import BlockTransfers, TransferFigures, TransferSetup

PROMPT = {
    "job": 1,
    "tokens": [5, 6],
    "count": 2,
    "first_block": 0,
    "sampling": {},
    "stop_ids": [],
    "grammar": None,
    "priority": 0,
    "salt": "",
}


class Engine:
    """An engine, and the cache and store beside it, that notes prompts and computes nothing."""

    block_bytes = 64
    own_blocks = None
    limits = BatchLimits(tokens=1, sequences=1)

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.aborted: list[int] = []
        self.looked_up: list[Callable[[], None]] = []

    def prefix_blocks(self) -> Engine:
        return self

    def identity(self) -> str:
        return "weights"

    def submit_samples(self, tokens: list[int], count: int, **_: Any) -> list[int]:
        if tokens == [0]:
            raise TypeError("a value that only the engine refuses")
        self.prompts.append(tokens)
        return list(range(10 * len(self.prompts), 10 * len(self.prompts) + count))

    def abort(self, number: int) -> None:
        self.aborted.append(number)

    def digests(self, tokens: list[int], salt: str, *, tail: bool = False) -> list[bytes]:
        return [b"digest"]

    def can_hold(self, digests: Sequence[bytes]) -> bool:
        return True

    def missing(self, digests: Sequence[bytes]) -> int:
        return 1

    def unsent(self, digests: Sequence[bytes], first: int) -> Any:
        class UnsentNumbers(list[int]):
            def release(self) -> None:
                self.clear()

            def extend(self, *_: Any) -> None: ...

        return UnsentNumbers()

    def reserve(self, digests: Sequence[bytes], others: int, tokens: int | None = None) -> Any:
        class Reserved(list[bytes]):
            first = 0

            def release(self) -> None:
                self.clear()

        return Reserved(digests)

    def fetch(self, tokens: list[int], salt: str, done: Callable[[], None]) -> None:
        self.looked_up.append(done)

    def publish(self, number: int, tokens: list[int], salt: str) -> None:
        pass


class Sender:
    """A sender of blocks on such an engine, and receivers that are connected to it."""

    def __init__(self, folder: Path, *, store: bool = False) -> None:
        self.engine, self.peers = Engine(), list[FrameSocket]()
        engine = cast("Any", self.engine)
        self.jobs = PrefillJobs(engine, engine, listen(f"unix:{folder}/a"), "", 1.0, engine if store else None)
        self.jobs.use_identity("weights")

    def connect(self) -> tuple[PrefillConnection, FrameSocket]:
        ours, theirs = socket.socketpair()
        connection, peer = PrefillConnection(ours, 0.0), FrameSocket(theirs)
        peer.limit = 1 << 20
        self.peers.append(peer)
        self.jobs.connections.append(connection)
        self.greet(connection, peer)
        return connection, peer

    def greet(self, connection: PrefillConnection, peer: FrameSocket) -> None:
        """Exchange proofs."""
        peer.introduce("")
        self.jobs.serve(connection, readable=True)
        assert peer.proves(peer.receive()[0].message)
        peer.say_hello({"identity": "weights"})
        self.jobs.serve(connection, readable=True)

    def say(self, connection: PrefillConnection, peer: FrameSocket, message: dict[str, Any]) -> None:
        peer.send(message)
        self.jobs.serve(connection, readable=True)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    sender = Sender(tmp_path)
    yield sender
    sender.jobs.close()
    for peer in sender.peers:
        peer.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": ["5"]},
        {"tokens": [5, -1]},
        {"tokens": "5"},
        {"count": "2"},
        {"count": 1.5},
        {"first_block": None},
        {"sampling": {"heat": 1}},
        {"sampling": None},
        {"stop_ids": None},
        {"grammar": [1, 2]},
        {"grammar": ["regex"]},
        {"priority": "1"},
        {"salt": None},
    ],
)
def test_a_wrong_prompt_ends_the_connection_and_is_not_submitted(sender: Sender, wrong: dict[str, Any]) -> None:
    connection, peer = sender.connect()
    sender.say(connection, peer, {"prefill": PROMPT | wrong})
    assert not sender.engine.prompts and not sender.jobs.connections


def test_a_number_of_texts_out_of_range_is_refused(sender: Sender) -> None:
    connection, peer = sender.connect()
    for _ in ("welcome", "load"):  # a descriptor ends what is read at once
        peer.receive()
    for number, count in enumerate((0, MOST_SEQUENCES + 1)):
        sender.say(connection, peer, {"prefill": PROMPT | {"job": number, "count": count}})
        assert [frame.message["failed"] for frame in peer.receive()] == [number]
    assert not sender.engine.prompts and sender.jobs.connections


def test_an_error_after_a_look_up_fails_its_prompt_only(tmp_path: Path) -> None:
    sender = Sender(tmp_path, store=True)
    for tokens in ([0], [5, 6]):
        sender.say(*sender.connect(), {"prefill": PROMPT | {"tokens": tokens}})
    connections = list(sender.jobs.connections)
    for done in sender.engine.looked_up:
        done()
    assert sender.jobs.connections == connections and sender.engine.prompts == [[5, 6]]
    sender.jobs.close()
    for peer in sender.peers:
        peer.close()


def test_reports_to_a_stuck_receiver_do_not_pile_up(sender: Sender) -> None:
    connection, peer = sender.connect()
    while not connection.frames.sending:
        connection.frames.send({"load": 1, "accepting": True})
    waiting = len(connection.frames._outgoing)
    sender.jobs.accepting = False
    for _ in range(10):
        sender.jobs.report_load()
    assert len(connection.frames._outgoing) == waiting
    messages = []
    while connection.frames.sending or not messages or messages[-1]["accepting"]:
        messages += [frame.message for frame in peer.receive()]
        sender.jobs.serve(connection, readable=False)
    assert [message.get("accepting") for message in messages].count(False) == 1


def test_a_greeting_without_memory_ends_the_connection(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any) -> Staging:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(prefill_jobs, "Staging", exhausted)
    monkeypatch.setattr(store_client, "Staging", exhausted)
    sender.connect()
    assert not sender.jobs.connections
    client = StoreClient(cast("Any", sender.engine), f"unix:{sender.jobs.listening.getsockname()}", "")
    client.tick(1.0)
    assert client.frames is None and client._retry > 1.0


def test_a_lost_store_lets_all_prompts_go_on(sender: Sender) -> None:
    def fail() -> None:
        raise ConnectionError

    client, done = StoreClient(cast("Any", sender.engine), "unix:none", ""), list[int]()
    calls = (lambda: done.append(0), fail, lambda: done.append(2))
    client._fetches = {number: Fetch([], 0, call, 0.0) for number, call in enumerate(calls)}
    with pytest.raises(ConnectionError):
        client.tick(1e9)
    assert done == [0, 2]


def test_descriptors_of_a_peer_do_not_pile_up() -> None:
    ours, theirs = socket.socketpair()
    frames, open_before = FrameSocket(ours), len(os.listdir("/proc/self/fd"))
    with theirs, open(os.devnull) as file:
        for _ in range(2):
            socket.send_fds(theirs, [b"\0"], [file.fileno()])
        with pytest.raises(BadFrame):
            for _ in range(2):
                frames.receive()
    frames.close()
    assert len(os.listdir("/proc/self/fd")) == open_before - 2


class Receiver:
    """A receiver of blocks whose one prompt is at a peer."""

    def __init__(self, folder: Path) -> None:
        self.submitted: list[Any] = []
        with listen(f"unix:{folder}/a") as listening:
            setup = TransferSetup(role="decode", peers=(f"unix:{folder}/a",))
            submit = lambda request, firsts: self.submitted.append(firsts)  # noqa: E731
            self.transfers = BlockTransfers(cast("Any", Engine()), setup, submit)
            self.frames, self.staging = FrameSocket(listening.accept()[0]), Staging(Engine.block_bytes)
        self.client, self._other = socket.socketpair()
        assert self.frames.take_hello(self.frames.receive()[0].message, "") is None
        self.transfers.wait((self.client.fileno(),), lambda: True)
        assert self.frames.take_hello(self.frames.receive()[0].message, "") == {"identity": "weights", "host": ""}
        sizes = {"block_bytes": Engine.block_bytes, "slots": self.staging.slots}
        self.frames.send({"welcome": sizes}, descriptor=self.staging.descriptor)
        self.transfers.wait((self.client.fileno(),), lambda: True)  # a descriptor ends what is read at once
        self.say({"load": 0, "accepting": True})
        assert self.transfers.begin({"ids": [0], **{key: PROMPT[key] for key in SHARED_KEYS}})

    def say(self, message: dict[str, Any]) -> None:
        self.frames.send(message)
        self.transfers.wait((self.client.fileno(),), lambda: True)

    def close(self) -> None:
        self.transfers.close()
        self.staging.close()
        for end in (self.frames, self.client, self._other):
            end.close()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    receiver = Receiver(tmp_path)
    yield receiver
    receiver.close()


@pytest.mark.parametrize(
    "first",
    [
        [["5"], {"reason": "length"}],
        [5, {"reason": "length"}],
        [[5], {"reason": "length", "error": 3}],
        [[5], {"reason": "length", "logprobs": 0}],
        [[5], {"reason": "length", "unknown": 0}],
        [[5], "length"],
    ],
)
def test_a_prompt_with_a_wrong_first_token_is_computed_here(receiver: Receiver, first: list[Any]) -> None:
    receiver.say({"first": 0, "texts": [first]})
    assert receiver.submitted == [None] and receiver.transfers.figures.usable_peers == 0


def test_a_first_token_continues_the_text(receiver: Receiver) -> None:
    receiver.say({"first": 0, "texts": [[[5], {"reason": "length"}]]})
    assert receiver.submitted == [[[[5], {"reason": "length"}]]] and receiver.transfers.figures.usable_peers == 1


def test_what_has_arrived_is_read_before_a_lease_ends(receiver: Receiver) -> None:
    for peer in receiver.transfers._receiver.peers:
        for prompt in peer.prompts.values():
            prompt.heard = -1e9
    receiver.transfers._next_tick = 0.0
    receiver.say({"load": 3, "accepting": True})
    assert receiver.transfers.figures.waiting_prompts == 1 and not receiver.submitted


def test_failed_steps_of_prompts_for_other_engines_count() -> None:
    steps = []

    def step() -> list[Update]:
        steps.append(len(steps))
        assert len(steps) <= FAILED_STEPS
        return [Update(steps[-1], (), "", "failed", "wrong", code="engine_failed")]

    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = SimpleNamespace(unfinished=1, step=step, figures=dict)
        loop = EngineLoop(cast("Any", engine), EngineConnection(theirs))
        nothing: Callable[..., Any] = lambda *_: None  # noqa: E731
        transfers = SimpleNamespace(wait=nothing, figures=TransferFigures(), after_step=lambda _: [], close=nothing)
        loop.transfers = cast("Any", transfers)
        with pytest.raises(EngineLost):
            loop.run()


class Impostor:
    """Listens at the address of a peer or store without its key."""

    def __init__(self, address: str) -> None:
        self.listening = listen(address)

    def hear(self, act: Callable[[], object], answer: Any) -> bytes:
        """All that the connecting side sends before and after an answer."""
        end, _ = self.listening.accept()
        end.settimeout(0.2)
        heard = bytearray()
        act()
        heard += end.recv(1 << 16)
        FrameSocket(end).send(answer(json.loads(bytes(heard[8:]))["nonce"]))
        act()
        end.setblocking(True)
        end.settimeout(0.2)
        with suppress(OSError):
            heard += end.recv(1 << 16)
        end.close()
        return bytes(heard)


@pytest.mark.parametrize(
    "answer",
    [
        lambda nonce: {"welcome": {"block_bytes": 64, "slots": 1}},
        lambda nonce: {"nonce": nonce, "proof": nonce},
        lambda nonce: answer_challenge("another key", nonce)[0],
    ],
    ids=["no proof", "the nonce back", "another key"],
)
def test_an_engine_tells_a_stranger_nothing(tmp_path: Path, answer: Any) -> None:
    """Neither the key nor its hello, at the address of an engine for prompts and at that of a store."""
    stranger = Impostor(f"unix:{tmp_path}/a")
    setup = TransferSetup(role="decode", peers=(f"unix:{tmp_path}/a",), key="the secret key")
    transfers = BlockTransfers(cast("Any", Engine()), setup, lambda request, firsts: None)
    heard = stranger.hear(lambda: transfers.wait((), lambda: True), answer)
    assert b"nonce" in heard and b"hello" not in heard and b"secret" not in heard
    assert not transfers.figures.usable_peers
    transfers.close()
    client = StoreClient(cast("Any", Engine()), f"unix:{tmp_path}/a", "the secret key")
    client.use_identity("weights")
    client.tick(1e9)
    heard = stranger.hear(lambda: client.serve(readable=True), answer)
    assert b"nonce" in heard and b"hello" not in heard and b"secret" not in heard and not client.usable
    client.close()
    stranger.listening.close()


def test_strangers_keep_no_engine_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_jobs, "TRANSFERS", replace(TRANSFERS, connections=3))
    sender = Sender(tmp_path)
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(10)]
    for stranger in strangers:
        stranger.connect(str(tmp_path / "a"))
        sender.jobs.accept(readable=True)
    assert len(sender.jobs.connections) == 3
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.connect(str(tmp_path / "a"))
        sender.jobs.accept(readable=True)
        connection, peer = sender.jobs.connections[-1], FrameSocket(end)
        peer.limit = 1 << 20
        sender.greet(connection, peer)
        for _ in range(10):
            strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            strangers[-1].connect(str(tmp_path / "a"))
            sender.jobs.accept(readable=True)
        assert connection in sender.jobs.connections and len(sender.jobs.connections) == 3
    for stranger in strangers:
        stranger.close()
    sender.jobs.close()
