"""The control plane over real sockets: who may speak, and what malformed requests get."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.connections.accept import listen_at
from meshwright.connections.limits import COORDINATOR
from meshwright.connections.proof import Challenge, ProofSession, WrongProof, answer_challenge
from meshwright.events.messages import FailureMessage, ProgressMessage
from meshwright.launch import control, http_listener
from meshwright.launch.control import ControlClient, ControlServer, coordinator_address
from meshwright.launch.hosts import checked_report
from meshwright.launch.outcome import RankState
from meshwright.launch.reports import Directive, Report
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import to_plain
from meshwright.spec.job_token import TOKEN_VARIABLE, job_token

TOKEN, RUN = "0123456789abcdef", "small"
REPORT = Report(
    "a/1",
    "127.0.0.1",
    4000,
    2,
    False,
    (RankState(3, -9, FailureMessage(5, "lost"), 7, ProgressMessage("train", 8, 3), 99),),
    (4,),
    ((16, 24),),
)


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """A server that answers reports, in a thread."""
    listener = listen_at(("127.0.0.1", 0))
    address = listener.getsockname()
    server_ended = threading.Event()
    handlers = {"POST /report": lambda value: to_plain(Directive("wait", checked_report(value).attempt))}
    serving = ControlServer(listener, TOKEN, handlers, RUN)

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


def exchange(address: tuple[str, int], *messages: bytes) -> bytes:
    """Everything that the server sends in answer until it closes the connection or is silent."""
    with socket.create_connection(address, timeout=60) as connection:
        return send(connection, b"".join(messages))


def send(connection: socket.socket, data: bytes) -> bytes:
    """Everything that comes in answer to `data`."""
    connection.sendall(data)
    connection.settimeout(0.3)
    answer = b""
    with suppress(TimeoutError):
        while received := connection.recv(1 << 16):
            answer += received
    return answer


@contextmanager
def proved(address: tuple[str, int], token: str = TOKEN) -> Iterator[tuple[socket.socket, ProofSession]]:
    """A connection after the exchange of nonces."""
    with socket.create_connection(address, timeout=60) as connection:
        challenge = Challenge(token, RUN)
        answer = send(connection, f"GET /proof HTTP/1.1\r\nnonce: {challenge.nonce}\r\n\r\n".encode())
        yield connection, challenge.session(**json.loads(answer.partition(b"\r\n\r\n")[2]))


def request(
    session: ProofSession,
    body: bytes = b"{}",
    method: str = "POST",
    path: str = "/report",
    lines: str = "",
    **headers: str,
) -> bytes:
    """A request with its proof; `headers` replace those that it has."""
    digest = hashlib.sha256(body).hexdigest()
    proof = session.sign(method.encode(), path.encode(), digest.encode())
    headers = {"digest": digest, "proof": proof, "content-length": str(len(body)), **headers}
    shown = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\n{shown}{lines}\r\n".encode() + body


def report_with(**values: object) -> bytes:
    return json.dumps({**to_plain(REPORT), **values}).encode()


def test_reports_and_directives_survive_the_connection_which_is_kept_open() -> None:
    assert checked_report(json.loads(json.dumps(to_plain(REPORT)))) == REPORT
    with server() as address:
        client = ControlClient(address, TOKEN, RUN)
        assert [client.report(REPORT) for _ in range(3)] == [Directive("wait", 2)] * 3
        port = client._connection.sock.getsockname()  # type: ignore[union-attr]
        client.report(REPORT)
        assert client._connection.sock.getsockname() == port  # type: ignore[union-attr]
        client.close()


def test_without_the_token_nothing_is_answered_but_401() -> None:
    stranger = ProofSession(b"key", b"client", b"listener")
    for data in (
        request(stranger),
        b"POST /report HTTP/1.1\r\n\r\n",
        f"POST /report HTTP/1.1\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: 2\r\n\r\n{{}}".encode(),
        b"GET /proof HTTP/1.1\r\n\r\n",
        b"GET /proof HTTP/1.1\r\nnonce: 00\r\n\r\n",
        b"GET /state HTTP/1.1\r\n\r\n",
    ):
        with server() as address:
            assert exchange(address, data, data).startswith(b"HTTP/1.1 401 ")
            assert exchange(address, data, data).count(b"HTTP/1.1") == 1
    for wrong in (ControlClient(address, "another token 12", RUN), ControlClient(address, TOKEN, "another run")):
        with server() as address:
            wrong._address = address
            with pytest.raises(WrongProof, match="not this run's coordinator: it has another key, or belongs to anot"):
                wrong.report(REPORT)


def test_a_client_without_the_token_passes_no_request_after_the_proof_of_the_server() -> None:
    with server() as address, socket.create_connection(address, timeout=60) as connection:
        answer = send(connection, f"GET /proof HTTP/1.1\r\nnonce: {'0' * 64}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 200 ") and TOKEN.encode() not in answer
        guess = ProofSession(
            bytes.fromhex(json.loads(answer.partition(b"\r\n\r\n")[2])["proof"]), b"client", b"listener"
        )
        assert send(connection, request(guess, report_with())).startswith(b"HTTP/1.1 401 ")


def test_requests_are_not_taken_again_or_changed() -> None:
    with server() as address:
        with proved(address) as (connection, session):
            first = request(session, report_with())
            assert send(connection, first).startswith(b"HTTP/1.1 200 ")
            assert send(connection, first).startswith(b"HTTP/1.1 401 "), "the same request again"
        with proved(address) as (connection, _):
            assert send(connection, first).startswith(b"HTTP/1.1 401 "), "on another connection"
        with proved(address) as (connection, session):
            changed = request(session, report_with()).replace(b"a/1", b"b/1")
            assert send(connection, changed).startswith(b"HTTP/1.1 401 "), "with another body"
        with proved(address) as (connection, session):
            changed = request(session, b"", "GET", "/state").replace(b"/state", b"/other")
            assert send(connection, changed).startswith(b"HTTP/1.1 401 "), "with another path"


@pytest.mark.parametrize("kind", ["no proof", "its own nonce", "the client's nonce back", "changed answers"])
def test_an_agent_believes_no_coordinator_without_the_token(kind: str) -> None:
    """Whoever listens at the address learns nothing and gives no orders."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor() -> None:
            connection, _ = listener.accept()
            with connection:
                session = None
                for _ in range(2):
                    data = connection.recv(1 << 16)
                    heard.extend(data)
                    if not data:
                        return
                    nonce = data.partition(b"nonce: ")[2].partition(b"\r\n")[0].decode()
                    lie = Directive("exit", 1, code=0)
                    if kind == "no proof":
                        answer: object = to_plain(lie)
                    elif kind == "its own nonce":
                        answer, _ = answer_challenge("another token 12", nonce, RUN)
                    elif kind == "the client's nonce back":
                        answer = {"nonce": nonce, "proof": nonce}
                    elif session is None:
                        answer, session = answer_challenge(TOKEN, nonce, RUN)  # relayed from the true coordinator
                    else:
                        answer = to_plain(lie)
                    content = json.dumps(answer).encode()
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))

        thread = threading.Thread(target=impostor)
        thread.start()
        client = ControlClient(listener.getsockname(), TOKEN, RUN)
        with pytest.raises(WrongProof):
            client.report(REPORT)
        thread.join()
    assert TOKEN.encode() not in heard
    assert (b"/report" in heard) == (kind == "changed answers"), "no report goes to a stranger"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET /state\r\n\r\n", 400),
        (b"GET /proof HTTP/1.0\r\n\r\n", 400),
        (b"A" * 9000, 431),
        (b"GET /proof HTTP/1.1\r\nnonce: 0\r\ncontent-length: 5\r\n\r\nhello", 413),
    ],
)
def test_strangers_are_refused_and_the_server_goes_on(data: bytes, status: int) -> None:
    with server() as address:
        assert exchange(address, data).startswith(f"HTTP/1.1 {status} ".encode())
        assert ControlClient(address, TOKEN, RUN).report(REPORT) == Directive("wait", 2)


@pytest.mark.parametrize(
    ("make", "status"),
    [
        (lambda session: request(session, lines="proof: again\r\n"), 400),
        (lambda session: request(session, lines="Transfer-Encoding: chunked\r\n"), 411),
        (lambda session: request(session, b"", **{"content-length": "99999999"}), 413),
        (lambda session: request(session, b"", **{"content-length": "-1"}), 411),
        (lambda session: request(session, b"", "GET", "/secrets"), 404),
        (lambda session: request(session, b"", "GET", "/proof"), 404),
        (lambda session: request(session, b"[1]"), 400),
        (lambda session: request(session, b"{"), 400),
        (lambda session: request(session, b"[" * 100_000), 400),
        (lambda session: request(session, report_with(host={})), 400),
        (lambda session: request(session, report_with(attempt=1e9)), 400),
        (lambda session: request(session, report_with(other=1)), 400),
    ],
)
def test_a_malformed_request_is_refused_and_the_server_goes_on(
    make: Callable[[ProofSession], bytes], status: int
) -> None:
    with server() as address:
        with proved(address) as (connection, session):
            assert send(connection, make(session)).startswith(f"HTTP/1.1 {status} ".encode())
        assert ControlClient(address, TOKEN, RUN).report(REPORT) == Directive("wait", 2)


@pytest.mark.parametrize(
    "sent", [b"", b"POST /report HTTP/1.1\r\n", b"GET /proof HTTP/1.1\r\nnonce: " + b"0" * 64 + b"\r\n\r\n"]
)
def test_connections_without_a_proof_are_closed_after_a_while(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "COORDINATOR", replace(COORDINATOR, head_seconds=0.2))
    monkeypatch.setattr(http_listener, "SWEEP_SECONDS", 0.1)
    with server() as address, socket.create_connection(address, timeout=60) as connection:
        connection.sendall(sent)
        while connection.recv(1000):
            pass


def test_idle_strangers_keep_no_agent_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all places taken, the stranger that waits longest makes room; an agent that has shown the token does not."""
    monkeypatch.setattr(control, "COORDINATOR", replace(COORDINATOR, connections=8))
    with server() as address, ExitStack() as stack:
        first = ControlClient(address, TOKEN, RUN)
        first.report(REPORT)
        strangers = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(30)]
        connection = first._connection.sock  # type: ignore[union-attr]
        for _ in range(3):
            assert ControlClient(address, TOKEN, RUN).report(REPORT) == Directive("wait", 2)
        assert first.report(REPORT) == Directive("wait", 2)
        assert first._connection.sock is connection  # type: ignore[union-attr]
        assert strangers[0].recv(1) == b""


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
