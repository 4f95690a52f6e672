"""Before the first collective: too few open files and a missing rank 0 are one sentence with an exit code."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest

from meshwright.parallel import rendezvous
from meshwright.parallel.rendezvous import raise_file_limit, reach
from meshwright.spec.errors import CommunicationFailure, OutOfResources
from meshwright.spec.rank_environment import RankEnvironment


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits of open files that the code sees (last entry) and sets, in rank_environment of this process's own."""
    limits = [(24, 24)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    return limits


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def rank_environment(port: int, address: str = "127.0.0.1") -> RankEnvironment:
    return RankEnvironment(1, 2, 1, 2, address, port)


def test_too_few_open_files_are_refused(limits: list[tuple[int, int]]) -> None:
    with pytest.raises(
        OutOfResources,
        match=r"may open 24 files here, and each rank of a job of 2 ranks needs about 68; .*ulimit -n 68",
    ):
        raise_file_limit(2)
    assert limits == [(24, 24)]


def test_the_soft_limit_is_raised_to_the_hard_one(limits: list[tuple[int, int]]) -> None:
    limits.append((24, 4096))
    raise_file_limit(8)
    assert limits[-1] == (4096, 4096)
    with pytest.raises(OutOfResources):
        raise_file_limit(10_000)
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    raise_file_limit(10_000)


def test_a_rank_0_that_listens_is_reached(listener: socket.socket) -> None:
    reach(rank_environment(listener.getsockname()[1]), timedelta(seconds=5))
    assert listener.accept()


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-host.invalid"])
def test_a_missing_rank_0_is_one_sentence(
    listener: socket.socket, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0.01)
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(CommunicationFailure) as refused:
        reach(rank_environment(port, address), timedelta(seconds=0.1))
    text = str(refused.value)
    assert text.startswith(f"rank 1 cannot reach rank 0 at {address}:{port} (tried for 0 s: ") and "\n" not in text
