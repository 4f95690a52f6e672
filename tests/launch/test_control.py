"""The control plane over real sockets: who may speak, and what malformed requests get."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright.events.messages import Failure, Progress
from meshwright.launch import control
from meshwright.launch.control import ControlClient, ControlServer, coordinator_address, listen
from meshwright.launch.hosts import checked_report
from meshwright.launch.outcome import RankState
from meshwright.launch.reports import Directive, Report
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import to_plain
from meshwright.spec.job_token import TOKEN_VARIABLE, job_token

TOKEN = "0123456789abcdef"
REPORT = Report(
    "a/1",
    "127.0.0.1",
    4000,
    2,
    False,
    (RankState(3, -9, Failure(5, "lost"), 7, Progress("train", 8, 3), 99),),
    (4,),
    ((16, 24),),
)


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """A server that answers reports, in a thread."""
    listener = listen(("127.0.0.1", 0))
    address = listener.getsockname()
    server_ended = threading.Event()
    handlers = {"POST /report": lambda value: to_plain(Directive("wait", checked_report(value).attempt))}
    serving = ControlServer(listener, TOKEN, handlers)

    def serve() -> None:
        while not server_ended.is_set():
            serving.serve(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield address
    finally:
        server_ended.set()
        thread.join()
        serving.close()


def exchange(address: tuple[str, int], data: bytes) -> bytes:
    """Everything that the server sends in answer to `data` until it closes the connection or is silent."""
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(data)
        connection.settimeout(0.5)
        answer = b""
        try:
            while received := connection.recv(1 << 16):
                answer += received
        except TimeoutError:
            pass
        return answer


def request(
    body: bytes = b"{}", token: str = TOKEN, head: str = "POST /report HTTP/1.1", extra_headers: str = ""
) -> bytes:
    return (
        f"{head}\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n{extra_headers}\r\n".encode() + body
    )


def test_reports_and_directives_survive_the_connection_which_is_kept_open() -> None:
    assert checked_report(json.loads(json.dumps(to_plain(REPORT)))) == REPORT
    with server() as address:
        client = ControlClient(address, TOKEN)
        assert [client.report(REPORT) for _ in range(3)] == [Directive("wait", 2)] * 3
        port = client._connection.sock.getsockname()  # type: ignore[union-attr]
        client.report(REPORT)
        assert client._connection.sock.getsockname() == port  # type: ignore[union-attr]
        client.close()


def test_without_the_token_nothing_is_answered_but_401() -> None:
    with server() as address:
        for data in (
            request(token=""),
            request(token=TOKEN[:-1]),
            request(token=TOKEN + "0"),
            b"POST /report HTTP/1.1\r\n\r\n",
        ):
            assert exchange(address, data + request()).startswith(b"HTTP/1.1 401 ")
            assert exchange(address, data + request()).count(b"HTTP/1.1") == 1
        with pytest.raises(BadInput, match="answers 401"):
            ControlClient(address, "another token 12").report(REPORT)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET /state\r\n\r\n", 400),
        (request(head="POST /report HTTP/1.0"), 400),
        (request(extra_headers=f"authorization: Bearer {TOKEN}\r\n"), 400),
        (b"A" * 9000, 431),
        (request(extra_headers="Transfer-Encoding: chunked\r\n"), 411),
        (f"POST /report HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 99999999\r\n\r\n".encode(), 413),
        (f"POST /report HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: -1\r\n\r\n".encode(), 411),
        (request(head="GET /secrets HTTP/1.1"), 404),
        (request(b"[1]"), 400),
        (request(b"{"), 400),
        (request(b"[" * 100_000), 400),
        (request(json.dumps({**to_plain(REPORT), "host": {}}).encode()), 400),
        (request(json.dumps({**to_plain(REPORT), "attempt": 1e9}).encode()), 400),
        (request(json.dumps({**to_plain(REPORT), "other": 1}).encode()), 400),
    ],
)
def test_a_malformed_request_is_refused_and_the_server_goes_on(data: bytes, status: int) -> None:
    with server() as address:
        assert exchange(address, data).startswith(f"HTTP/1.1 {status} ".encode())
        assert ControlClient(address, TOKEN).report(REPORT) == Directive("wait", 2)


def test_connections_without_a_token_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "UNKNOWN_SECONDS", 0.2)
    with server() as address, socket.create_connection(address, timeout=60) as connection:
        connection.sendall(b"POST /report HTTP/1.1\r\n")
        assert connection.recv(100) == b""


def test_the_token_file_is_private_and_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "token"
    env = {TOKEN_VARIABLE: str(file)}
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    assert job_token(env) == TOKEN
    file.chmod(0o604)
    with pytest.raises(BadInput, match="every user of this host can open"):
        job_token(env)
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(BadInput, match="at least 16 characters"):
        job_token(env)
    with pytest.raises(BadInput, match="is not set"):
        job_token({"HOME": "/"})


@pytest.mark.parametrize("text", [None, "", "host", "host:", ":1", "host:port", "host:99999"])
def test_an_address_is_a_host_and_a_port(text: str | None) -> None:
    with pytest.raises(BadInput, match="expected HOST:PORT"):
        coordinator_address(text)
