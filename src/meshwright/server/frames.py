"""Messages between the engines of a deployment: JSON and a payload of bytes, over a stream socket that never blocks."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.connections.accept import listen_at
from meshwright.connections.limits import TRANSFERS
from meshwright.connections.proof import Challenge, ProofSession, WrongProof, answer_challenge
from meshwright.spec.errors import BadInput
from meshwright.spec.listen_address import listen_address

UNIX = "unix:"
"""Prefix of a Unix socket's address."""
FIRST_BYTES = TRANSFERS.head_bytes
"""Longest message of a peer that has not shown its key."""
MESSAGE_BYTES = 64 << 20
"""Most bytes of a message's JSON, and most bytes of its payload."""
LONGEST_SOCKET_PATH = 107
"""Most bytes of a Unix socket's address on Linux (unix(7))."""
_HEADER = struct.Struct("!II")
"""Number of bytes of the JSON, and of the payload."""
_RECEIVE_BYTES = 1 << 20


class BadFrame(Exception):
    """A message that no peer of this version sends; the connection must be closed after it."""


class Frame(NamedTuple):
    """Message with its payload."""

    message: Mapping[str, Any]
    payload: bytearray
    """Bytes after the JSON."""


class FrameSocket:
    """A connection to another engine. Bytes that the system does not accept at once are sent by later calls of `flush`."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()
        self._descriptors: list[int] = []
        self._challenge: Challenge | None = None
        self._session: ProofSession | None = None
        self.limit = FIRST_BYTES
        """Longest message that is accepted; `MESSAGE_BYTES` once the peer has shown its key."""

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._end.fileno()

    @property
    def local(self) -> bool:
        """Whether the peer is on this host and can be given descriptors."""
        return self._end.family == socket.AF_UNIX

    @property
    def sending(self) -> bool:
        """Whether bytes are left that the system has not accepted yet."""
        return bool(self._outgoing)

    def send(
        self, message: Mapping[str, Any], payload: memoryview | None = None, descriptor: int | None = None
    ) -> None:
        """Send a message. `payload` must not change until the peer has answered. Raises EOFError if the peer has closed."""
        content = json.dumps(message, separators=(",", ":")).encode("ascii")
        size = 0 if payload is None else payload.nbytes
        data = memoryview(_HEADER.pack(len(content), size) + content)
        if descriptor is not None:
            try:  # a short message on a new connection
                sent = socket.send_fds(self._end, [data], [descriptor])
            except OSError:
                raise EOFError from None
            data = data[sent:]
        self._outgoing.append(data)
        if payload is not None and size:
            self._outgoing.append(payload.cast("B"))
        self.flush()

    def flush(self) -> None:
        """Send the remaining bytes. Raises EOFError if the peer has closed."""
        try:
            while self._outgoing:
                data = self._outgoing[0]
                sent = self._end.send(data) if data else 0
                if sent < len(data):
                    self._outgoing[0] = data[sent:]
                    continue
                self._outgoing.popleft()
        except BlockingIOError:
            return
        except OSError:
            raise EOFError from None

    def introduce(self, key: str) -> None:
        """Begin as the connecting side: the peer must prove that it knows the key (`connections/proof.py`)."""
        self._challenge = Challenge(key)
        self.send({"nonce": self._challenge.nonce})

    def proves(self, message: Mapping[str, Any]) -> bool:
        """Whether a message is the peer's proof. The caller then calls `say_hello`. False for all later messages.

        Raises BadFrame if the first message has no valid proof.
        """
        if self._session is not None:
            return False
        assert self._challenge is not None, "it is the connecting side"
        try:
            self._session = self._challenge.session(message.get("nonce"), message.get("proof"))
        except WrongProof as error:
            raise BadFrame(str(error)) from None
        return True

    def say_hello(self, values: Mapping[str, Any], descriptor: int | None = None) -> None:
        """Send the connecting side's own proof and what the peer must know."""
        assert self._session is not None, "the peer has proved that it knows the key"
        self.send({"hello": {**values, "proof": self._session.sign(_as_proved(values))}}, descriptor=descriptor)

    def take_hello(self, message: Mapping[str, Any], key: str) -> dict[str, Any] | None:
        """For the listening side. Answers a peer's first message and returns None; returns the second message, the hello.

        Raises BadFrame for a peer that does not prove that it knows the key.
        """
        if self._session is None:
            try:
                answer, self._session = answer_challenge(key, message.get("nonce"))
            except WrongProof as error:
                raise BadFrame(str(error)) from None
            self.send(answer)
            return None
        hello = dict(message["hello"])
        if not self._session.accepts(hello.pop("proof", None), _as_proved(hello)):
            raise BadFrame("a wrong key")
        return hello

    def receive(self) -> list[Frame]:
        """Messages that have arrived. Raises EOFError if the peer has closed, BadFrame for a wrong message or descriptor."""
        try:
            data = self._receive()
        except BlockingIOError:
            return []
        except OSError:
            raise EOFError from None
        if not data:
            raise EOFError
        self._incoming += data
        return self._complete()

    def _receive(self) -> bytes:
        if not self.local:
            return self._end.recv(_RECEIVE_BYTES)
        data, descriptors, _, _ = socket.recv_fds(self._end, _RECEIVE_BYTES, 1)
        self._descriptors += descriptors
        if len(self._descriptors) > 1:
            raise BadFrame("more than one descriptor waits")
        return data

    def _complete(self) -> list[Frame]:
        incoming = self._incoming
        start = 0
        frames = []
        while len(incoming) - start >= _HEADER.size:
            length, size = _HEADER.unpack_from(incoming, start)
            if length > self.limit or size > (0 if self.limit == FIRST_BYTES else MESSAGE_BYTES):
                raise BadFrame(f"a message of {length} and {size} bytes; expected at most {self.limit}")
            middle = start + _HEADER.size + length
            if len(incoming) < middle + size:
                break
            try:
                message = json.loads(incoming[start + _HEADER.size : middle])
            except ValueError:
                raise BadFrame("a message that is no JSON") from None
            if not isinstance(message, dict):
                raise BadFrame("a message that is no JSON object")
            frames.append(Frame(message, incoming[middle : middle + size]))
            start = middle + size
        del incoming[:start]
        return frames

    def take_descriptor(self) -> int | None:
        """A descriptor that the peer has given; the caller closes it."""
        return self._descriptors.pop() if self._descriptors else None

    def close(self) -> None:
        """Close the connection."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._outgoing.clear()
        self._end.close()


def _as_proved(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":"), sort_keys=True).encode("ascii")


def is_list_of_ids(value: object) -> bool:
    """Whether a value of a message is a list of token ids."""
    return isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value)


def listen(address: str, key: str = "transfer_address") -> socket.socket:
    """A socket that listens at `unix:PATH`, for processes of this user, or at HOST:PORT.

    If a dead process has left a socket at the path, it is replaced. Raises BadInput for the setting `key` if it cannot listen.
    """
    try:
        if address.startswith(UNIX):
            path = Path(address.removeprefix(UNIX))
            _remove_old_socket(path)
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            mask = os.umask(0o177)
            try:
                with _short_path(path) as name:
                    end.bind(name)
            finally:
                os.umask(mask)
            end.listen()
        else:
            end = listen_at(listen_address(address))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{key}: cannot listen at {address}: {reason}; choose another", key=key) from None
    end.setblocking(False)
    return end


def _remove_old_socket(path: Path) -> None:
    """Remove a socket at which nobody listens. Raises ValueError for another file, and for a socket that is in use."""
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise ValueError("a file that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end, _short_path(path) as name:
        end.setblocking(False)
        try:
            end.connect(name)
        except BlockingIOError:  # so many others wait for their connection
            pass
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ValueError("another process listens there")


def start_connecting(address: str) -> socket.socket | None:
    """Return a socket that is connected or still connecting to an address; None if nothing listens there."""
    path = Path(address.removeprefix(UNIX)) if address.startswith(UNIX) else None
    try:
        target: Any = None if path else listen_address(address)
        family = socket.AF_UNIX
        if target is not None:
            family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
        end = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, ValueError):
        return None
    end.setblocking(False)
    try:
        with _short_path(path) if path else nullcontext(target) as name:
            end.connect(name)
    except BlockingIOError:
        if path:  # the queue of the listener is full
            end.close()
            return None
    except OSError:
        end.close()
        return None
    return end


@contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """The path of a socket's file. If it is too long for a socket's address, a path through a descriptor of its folder."""
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
