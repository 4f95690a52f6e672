"""Accepting with a full table of open files, which connection makes room, and proofs of a key."""

from __future__ import annotations

import errno
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from meshwright.connections import accept
from meshwright.connections import limits as limits_module
from meshwright.connections.accept import Acceptor
from meshwright.connections.limits import COORDINATOR, ListenerLimits, raise_file_limit
from meshwright.connections.proof import Challenge, ProofSession, WrongProof, answer_challenge
from meshwright.connections.table import ConnectionTable

SMALL = ListenerLimits(connections=3, files=1.0)


@contextmanager
def open_files(soft: int) -> Iterator[None]:
    """A soft limit of open files within the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_accept_goes_on_after_a_full_table_and_lets_nobody_wait_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener, ExitStack() as stack:
        acceptor = Acceptor(listener)
        clients = [socket.create_connection(listener.getsockname(), timeout=60) for _ in range(4)]
        for client in clients:
            stack.enter_context(client)
        highest = max(client.fileno() for client in clients) + 1
        with open_files(highest):  # no further descriptor can be opened
            for _ in range(len(clients)):
                assert acceptor.accept() == []
            assert not select.select([listener], [], [], 0.05)[0], "none waits any more, so that select does not spin"
        assert [client.recv(1) for client in clients] == [b""] * 4
        late = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=60))
        (accepted,) = acceptor.accept()
        assert accepted.getpeername() == late.getsockname()
        accepted.close()
        acceptor.close()


def test_accept_pauses_if_every_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connections still wait, so that `select` would return at once."""

    def fail() -> None:
        raise OSError(errno.EIO, "it fails")

    pauses: list[float] = []
    monkeypatch.setattr(accept.time, "sleep", pauses.append)
    listener = SimpleNamespace(setblocking=lambda value: None, accept=fail)
    acceptor = Acceptor(cast(socket.socket, listener))
    assert acceptor.accept() == [] and pauses == [accept.PAUSE_SECONDS]
    acceptor.close()


def test_the_connection_that_waits_longest_makes_room() -> None:
    now = [0.0]
    table: ConnectionTable[str] = ConnectionTable(SMALL, lambda: now[0])
    assert [table.add(name, 5.0) for name in "abc"] == [None] * 3
    table.keep("a")
    assert table.add("d", 5.0) == "b"
    table.keep("c", 3.0)
    table.keep("d")
    assert table.add("e", 5.0) == "e", "all have work"
    table.wait("d", 1.0)
    now[0] = 2.0
    assert table.late() == ["d"]
    now[0] = 4.0
    assert table.late() == ["c", "d"] and len(table) == 3
    table.remove("c")
    assert table.add("f", 1.0) is None


def test_connections_stay_well_below_the_limit_of_files() -> None:
    with open_files(256):
        shares = [limits for limits in vars(limits_module).values() if isinstance(limits, ListenerLimits)]
        assert len(shares) >= 7 and all(limits.most <= 128 for limits in shares)
        assert replace(COORDINATOR, connections=5).most == 5
        raise_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == min(hard, limits_module.MOST_FILES)


def test_a_proof_is_of_one_key_scope_connection_direction_and_number() -> None:
    challenge = Challenge("key", "run")
    answer, listener = answer_challenge("key", challenge.nonce, "run")
    client = challenge.session(**answer)
    first = client.sign(b"a", b"bc")
    assert not listener.accepts(first, b"ab", b"c"), "the parts are divided in another way"
    client, listener = challenge.session(**answer), ProofSession(listener._key, b"listener", b"client")
    assert listener.accepts(client.sign(b"a"), b"a") and client.accepts(listener.sign(b"a"), b"a")
    second = client.sign(b"b")
    assert listener.accepts(second, b"b") and not listener.accepts(second, b"b"), "a repeated message"
    assert not client.accepts(client.sign(b"c"), b"c"), "the client's own message"
    for key, scope in (("other", "run"), ("key", "other run"), ("", "run")):
        wrong, _ = answer_challenge(key, challenge.nonce, scope)
        with pytest.raises(WrongProof):
            challenge.session(**wrong)
    with pytest.raises(WrongProof):
        Challenge("key", "run").session(**answer)  # another connection
    for value in (None, 1, "", "0" * 63, "g" * 64, "0" * 65, "\ud800" * 64):
        with pytest.raises(WrongProof):
            answer_challenge("key", value)
        with pytest.raises(WrongProof):
            challenge.session(value, answer["proof"])
        assert not listener.accepts(value)
