"""An agent without its coordinator: what it says, when it ends, and when it goes on."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.connections.accept import listen_at
from meshwright.connections.proof import WrongProof
from meshwright.launch import hosts
from meshwright.launch.control import ControlClient, ControlServer, NoCoordinator, coordinator_address
from meshwright.launch.local import listening_socket
from meshwright.launch.outcome import RankState
from meshwright.launch.reports import Directive, Report
from meshwright.server.frames import listen as listen_for_transfers
from meshwright.spec.errors import EXIT_COMMUNICATION, BadInput

COMMAND = "meshwright train run.yaml --agent"
NOT_HERE = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Silence:
    """An agent with one rank, and its coordinator, which answers for 10 s and then at the `answers` times only.

    The first try without an answer takes `blocks` seconds, others 3 s at most.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        trains: bool = False,
        error: OSError | None = None,
        blocks: float = 0.0,
        answers: Callable[[float], bool] = lambda seconds: False,
        suspended_at: float | None = None,
    ) -> None:
        self.clock, self.lines = Clock(), list[str]()
        patch.setattr(hosts, "time", self.clock)
        patch.setattr(hosts, "write_line", self.lines.append)
        self._trains, self._error, self._blocks, self._answers = (
            trains,
            error or TimeoutError("timed out"),
            blocks,
            answers,
        )
        self._suspended_at = suspended_at
        self._count = 0
        self.last_answer = self.clock.now
        self.prepared_at: list[float] = []
        """Seconds since the last answer at which the agent prepared a restart."""
        agent = SimpleNamespace(
            poll=self._poll,
            report=self._report,
            obey=lambda directive: None,
            close_attempt=lambda: None,
            prepare_restart=lambda: self.prepared_at.append(self.clock.now - self.last_answer),
        )
        self.client = SimpleNamespace(report=self._ask, address=("10.0.0.1", 29400), move=self._move)
        self.watch = SimpleNamespace(asked=None, unanswered=True, standby=False)
        values = agent, self.client, self.watch
        self.link = hosts._Link(*(cast(Any, value) for value in values), COMMAND, lambda: None)

    @property
    def seconds(self) -> float:
        """Seconds since the silence began."""
        return self.clock.now - 110.0

    def _move(self, address: tuple[str, int]) -> None:
        self.client.address = address

    def _poll(self, seconds: float) -> None:
        self.clock.now += seconds
        self._count += self._trains
        if self._suspended_at is not None and self.seconds > self._suspended_at:
            self.clock.now, self._suspended_at = self.clock.now + 3600, None
        if self.seconds > 4_000:
            raise RuntimeError("it goes on")

    def _report(self) -> Report:
        return Report("b/1", attempt=1, ended=False, ranks=(RankState(1, progress_count=self._count),))

    def _ask(self, report: Report) -> Directive:
        if self.seconds < 0 or self._answers(self.seconds):
            self.last_answer = self.clock.now
            return Directive("run" if self.seconds < 1000 else "exit", 1)
        self.clock.now, self._blocks = self.clock.now + self._blocks, min(self._blocks, 3.0)
        raise self._error


@pytest.mark.parametrize(
    ("error", "blocks"),
    [(TimeoutError("timed out"), 3.0), (TimeoutError("timed out"), 10.0), (ConnectionRefusedError("refused"), 0.0)],
)
def test_an_agent_ends_within_30_s_of_the_loss_of_the_first_host_and_says_what_to_start_where(
    error: OSError, blocks: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = Silence(monkeypatch, error=error, blocks=blocks)
    assert silence.link.follow() == EXIT_COMMUNICATION
    assert 25 < silence.clock.now - silence.last_answer < 30.2
    said = silence.lines[-1]
    assert "the coordinator at 10.0.0.1:29400 has not answered for" in said and str(error) in said
    assert f"`{COMMAND}` on all hosts, 10.0.0.1 too" in said and "MESHWRIGHT_COORDINATOR" in said


def test_ranks_that_train_go_on_without_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = Silence(monkeypatch, trains=True)
    with pytest.raises(RuntimeError, match="goes on"):
        silence.link.follow()
    assert silence.prepared_at == [], "its ranks are not replaced"
    assert len(silence.lines) == 1 and "its ranks train on" in silence.lines[0]


@pytest.mark.parametrize("blocks", [0.0, 3.0])
def test_a_network_that_is_cut_for_20_s_ends_no_agent(blocks: float, monkeypatch: pytest.MonkeyPatch) -> None:
    silence = Silence(monkeypatch, blocks=blocks, answers=lambda seconds: seconds > 20)
    assert silence.link.follow() == 0
    assert silence.lines[-1] == "meshwright: the coordinator answers again"
    assert 8 < silence.prepared_at[0] < 12, "processes for the next attempt are ready when the network is back"


def test_the_time_in_which_an_agent_was_suspended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = Silence(monkeypatch, answers=lambda seconds: seconds > 3605, suspended_at=1.0)
    assert silence.link.follow() == 0


def test_an_agent_asks_where_the_coordinator_is_now_and_where_it_was_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watch moves the client; where nothing answers the first address is tried again."""
    first, other, asked = ("10.0.0.1", 29400), ("10.0.0.2", 5000), list[tuple[str, int]]()

    def answers(seconds: float) -> bool:
        asked.append(silence.client.address)
        if silence.watch.unanswered and asked[-1] == first:
            silence.client.address = other
        return seconds > 8 and asked[-1] == other

    silence = Silence(monkeypatch, answers=answers)
    assert silence.link.follow() == 0
    assert asked[:4] == [first, first, other, first] and asked[-1] == other
    assert silence.lines[-1] == "meshwright: the coordinator answers again, at 10.0.0.2:5000"
    assert not silence.watch.unanswered and silence.watch.asked is None


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoCoordinator("what listens at 10.0.0.1:29400 is no coordinator: it answers 404"), "choose another port"),
        (WrongProof("it has another key"), "the same token on all hosts"),
    ],
)
def test_what_is_no_coordinator_of_this_run_ends_an_agent_that_starts_and_none_that_has_had_one(
    error: OSError, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = Silence(monkeypatch, error=error)
    silence.clock.now = 111.0
    with pytest.raises(BadInput, match=text):
        silence.link.follow()
    later = Silence(monkeypatch, error=error, answers=lambda seconds: seconds > 20)
    assert later.link.follow() == 0


@pytest.mark.parametrize(
    ("obstacle", "here"), [(NOT_HERE, False), (PermissionError(errno.EACCES, "Permission denied"), True)]
)
def test_a_coordinator_that_cannot_be_reached_is_said_within_10_s(
    obstacle: OSError, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, said = Clock(), list[tuple[float, str]]()

    def fail(*values: object, **settings: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def start() -> None:
        raise obstacle

    monkeypatch.setattr(hosts, "time", clock)
    monkeypatch.setattr(hosts, "write_line", lambda text: said.append((clock.now - 100, text)))
    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(BadInput, match="nonode:29400 cannot be reached: .*Name or service not known"):
        hosts._reach(lambda: ("nonode", 29400), start)
    assert 300 < clock.now - 100 < 310
    ((seconds, text),) = said
    assert seconds < 10 and "nonode:29400 cannot be reached" in text and "tries for 300 s" in text
    assert ("no coordinator can be started here: [Errno 13] Permission denied" in text) is here


@pytest.mark.parametrize("answer", [b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_somebody_elses_server_is_recognised(answer: bytes) -> None:
    with (
        listen_at(("127.0.0.1", 0)) as listener,
        closing(ControlClient(listener.getsockname(), "a token", "run")) as client,
    ):

        def serve() -> None:
            connection = listener.accept()[0]
            connection.recv(1 << 16)
            connection.sendall(answer)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(NoCoordinator, match=f"127.0.0.1:{listener.getsockname()[1]} is no coordinator"):
            client.report(Report("a/1"))
        thread.join()


@pytest.mark.parametrize(
    ("text", "address"), [("[::1]:29400", ("::1", 29400)), ("host:1", ("host", 1)), ("10.0.0.1:0", ("10.0.0.1", 0))]
)
def test_addresses_of_a_coordinator(text: str, address: tuple[str, int]) -> None:
    assert coordinator_address(text) == address


@pytest.mark.parametrize("text", ["::1", "::1:29400", "fe80::1", "host", "host:", ":1", "[]:1", "host:65536", None])
def test_what_is_no_address_of_a_coordinator(text: str | None) -> None:
    with pytest.raises(BadInput, match=r"expected HOST:PORT or \[IPV6\]:PORT"):
        coordinator_address(text)


def has_ipv6() -> bool:
    try:
        listen_at(("::1", 0)).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_everything_that_supervision_and_transfers_listen_at_may_be_ipv6() -> None:
    listener = listen_at(("::1", 0))
    address = listener.getsockname()[:2]
    with closing(ControlServer(listener, "a token", {}, "run")):
        assert hosts._reach(lambda: address, lambda: None) == "::1"
    with listening_socket("::1") as store:
        assert store.family == socket.AF_INET6
    with listen_for_transfers("[::1]:0") as transfers:
        assert transfers.family == socket.AF_INET6
