"""The connection between agents and coordinator: JSON over HTTP/1.1 with keep-alive, where both sides prove that they know the job token.

`GET /proof` exchanges nonces (`connections/proof.py`). The coordinator proves first that it knows the token; an agent that gets no proof
sends nothing else. From then on, every request and every answer has an HMAC, which is bound to this connection and covers a running number
and the content. The token itself is never sent. The body of a request is read only if the proof in its head is right.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from meshwright.connections.limits import COORDINATOR
from meshwright.connections.proof import Challenge, ProofSession, WrongProof, answer_challenge
from meshwright.launch.http_listener import HttpConnection, HttpListener, HttpReply, HttpRequest
from meshwright.launch.reports import Directive, Report
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.listen_address import address_text
from meshwright.spec.rank_environment import COORDINATOR_VARIABLE

BODY_BYTES = 1 << 20
"""Largest body of a request or an answer, in bytes."""
CONNECT_SECONDS = 1.5
"""Longest time to connect to the coordinator.

TCP sends connection requests after 0 and 1 s; after that, a new attempt asks sooner again.
"""
ANSWER_SECONDS = 10.0
"""Longest time to wait for the coordinator's answer."""
PROOF_PATH = "/proof"
"""Path of the request that exchanges nonces."""
"""Path of the exchange of nonces."""
NONCE_HEADER = "nonce"
"""Header with the nonce."""
PROOF_HEADER = "proof"
"""Header with the proof."""
DIGEST_HEADER = "digest"
"""Header with the SHA-256 of the body."""

Handler = Callable[[Any], Any]
"""A function that answers the JSON value of a request with a JSON value. Raises ValueError, TypeError or KeyError for a bad request."""


def coordinator_address(text: str | None) -> tuple[str, int]:
    """The pair (host, port) in HOST:PORT or [IPV6]:PORT. Raises BadInput for another form."""
    host, _, port = (text or "").rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host.strip("[]") or (":" in host and not bracketed) or not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise BadInput(
            f"{COORDINATOR_VARIABLE} is {text!r}; expected HOST:PORT or [IPV6]:PORT of the coordinator, e.g. 10.0.0.1:29400"
        )
    return host[1:-1] if bracketed else host, int(port)


class NoCoordinator(ConnectionError):
    """Something other than a coordinator listens at the address."""


class ControlServer(HttpListener):
    """Serves the requests of agents. `handlers` has a handler for each method and path, e.g. `POST /report`."""

    body_bytes = BODY_BYTES

    def __init__(self, listener: socket.socket, token: str, handlers: dict[str, Handler], run: str = "") -> None:
        """`run` is the name of the run. Agents of another run are refused."""
        super().__init__(listener, COORDINATOR)
        self._token = token
        self._handlers = handlers
        self._run = run

    def admit(self, connection: HttpConnection, request: HttpRequest) -> int:
        """0 (admitted) for one exchange of nonces on each connection, and for requests with a valid proof; else a status."""
        session: ProofSession | None = connection.state
        if session is None:
            return 0 if request.path == PROOF_PATH else 401
        parts = _request_parts(request.method, request.path, request.headers.get(DIGEST_HEADER, ""))
        if not session.accepts(request.headers.get(PROOF_HEADER), *parts):
            return 401
        self.trust(connection)
        return 0

    def answer(self, connection: HttpConnection, request: HttpRequest, body: bytes) -> HttpReply:
        """The answer of the request's handler, with a proof."""
        session: ProofSession | None = connection.state
        if session is None:
            try:
                answer, connection.state = answer_challenge(self._token, request.headers.get(NONCE_HEADER), self._run)
            except WrongProof:
                return HttpReply(401, b"")
            return HttpReply(200, json.dumps(answer).encode())
        if hashlib.sha256(body).hexdigest() != request.headers.get(DIGEST_HEADER):
            return HttpReply(401, b"")
        status, value = self._handle(f"{request.method} {request.path}", body)
        content = json.dumps(value).encode()
        proof = session.sign(str(status).encode(), content)
        return HttpReply(status, content, headers=((PROOF_HEADER, proof),))

    def _handle(self, request: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON value of the answer to a request."""
        handler = self._handlers.get(request)
        if handler is None:
            return 404, {"error": f"no {request[:100]}"}
        try:
            return 200, handler(json.loads(body) if body else None)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return 400, {"error": str(error)[:200]}


def _request_parts(method: str, path: str, digest: str) -> tuple[bytes, ...]:
    """The parts of a request that its proof covers. `digest` stands for the body."""
    return method.encode("latin-1"), path.encode("latin-1"), digest.encode("latin-1")


class ControlClient:
    """An agent's connection to the coordinator. Each new connection begins with a new exchange of proofs."""

    def __init__(self, address: tuple[str, int], token: str, run: str = "") -> None:
        """`run` is the name of the run. A coordinator of another run is not accepted."""
        self._address = address
        self._token = token
        self._run = run
        self._connected = address
        """The address to which the current connection was made."""
        self._connection: http.client.HTTPConnection | None = None
        self._session: ProofSession | None = None

    def report(self, report: Report) -> Directive:
        """Send a report and return the coordinator's directive.

        Raises OSError if the coordinator cannot be reached. NoCoordinator and WrongProof, which are OSErrors too, mean that something else
        answers, or a process that does not know the token. Raises BadInput if the coordinator refuses the report.
        """
        return from_plain(Directive, self.request("POST", "/report", to_plain(report)))

    def request(self, method: str, path: str, value: Any = None) -> Any:
        """The answer to a request. Raises the same errors as `report`."""
        try:
            if self._connected != self._address:
                self.close()
            if self._connection is None or self._connection.sock is None or self._session is None:
                self._connected = self._address
                self._connection, self._session = self._connect()
            status, body = self._exchange(self._connection, self._session, method, path, value)
        except OSError:
            self.close()
            raise
        except (http.client.HTTPException, ValueError) as error:
            self.close()
            raise ConnectionError(f"no answer of a coordinator: {error}") from error
        if status != 200:
            raise BadInput(f"the coordinator at {self._name} answers {status}: {(body or {}).get('error')}")
        return body

    @property
    def address(self) -> tuple[str, int]:
        """The address at which the client expects the coordinator."""
        return self._address

    def move(self, address: tuple[str, int]) -> None:
        """Use another address from now on. A request that waits for its answer fails. Another thread may call this."""
        connection = self._connection
        if address == self._address:
            return
        self._address = address
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    @property
    def _name(self) -> str:
        return address_text(*self._address)

    def _connect(self) -> tuple[http.client.HTTPConnection, ProofSession]:
        """A connection to a process that has proved that it knows the token."""
        connection = http.client.HTTPConnection(*self._address, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            assert connection.sock is not None, "it is connected"
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sock.settimeout(ANSWER_SECONDS)
            challenge = Challenge(self._token, self._run)
            connection.request("GET", PROOF_PATH, headers={NONCE_HEADER: challenge.nonce})
            response = connection.getresponse()
            content = response.read(BODY_BYTES)
            if response.status != 200:
                raise NoCoordinator(f"what listens at {self._name} is no coordinator: it answers {response.status}")
            answer = json.loads(content)
            if not isinstance(answer, dict):
                raise ValueError("expected a proof")
            return connection, challenge.session(answer.get("nonce"), answer.get("proof"))
        except (http.client.BadStatusLine, http.client.LineTooLong, ValueError) as error:
            connection.close()
            if isinstance(error, http.client.RemoteDisconnected):
                raise
            raise NoCoordinator(f"what listens at {self._name} is no coordinator: {str(error)[:100]!r}") from None
        except WrongProof as error:
            connection.close()
            raise WrongProof(f"what listens at {self._name} is not this run's coordinator: {error}") from None
        except BaseException:
            connection.close()
            raise

    def _exchange(
        self, connection: http.client.HTTPConnection, session: ProofSession, method: str, path: str, value: Any
    ) -> tuple[int, Any]:
        """Send a request. Returns the status and the JSON value of the answer, after its proof was checked."""
        body = b"" if value is None else json.dumps(value).encode()
        digest = hashlib.sha256(body).hexdigest()
        proof = session.sign(*_request_parts(method, path, digest))
        headers = {DIGEST_HEADER: digest, PROOF_HEADER: proof, "Content-Type": "application/json"}
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        content = response.read(BODY_BYTES)
        if not session.accepts(response.headers.get(PROOF_HEADER), str(response.status).encode(), content):
            raise WrongProof(f"the answer {response.status} of {self._name} has no proof")
        return response.status, json.loads(content or b"null")

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._session = None
