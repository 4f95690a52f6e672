"""Messages between the engines of a deployment, over non-blocking stream sockets.

A message has a header of 8 bytes (the lengths of the JSON and of the payload), a JSON object, and a payload of bytes, which may be empty.
"""

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
"""Prefix of the address of a Unix socket: `unix:PATH`."""
FIRST_BYTES = TRANSFERS.head_bytes
"""Largest number of bytes of JSON in a message from a peer that has not proved the key. Such a message has no payload."""
MESSAGE_BYTES = 64 << 20
"""Largest number of bytes of the JSON, and largest number of bytes of the payload, in a message from a peer that has proved the key."""
LONGEST_SOCKET_PATH = 107
"""Largest number of bytes of a Unix socket's path on Linux (unix(7))."""
_HEADER = struct.Struct("!II")
"""Header of a message: the number of bytes of the JSON, and the number of bytes of the payload."""
_RECEIVE_BYTES = 1 << 20


class BadFrame(Exception):
    """A malformed or unexpected message. The connection must then be closed."""


class Frame(NamedTuple):
    """A message that was received."""

    message: Mapping[str, Any]
    """The JSON object."""
    payload: bytearray
    """The bytes after the JSON."""


class FrameSocket:
    """A connection to another engine. `send` never waits: later calls of `flush` send the bytes that the socket does not accept yet.

    The connecting side calls `introduce`, `proves` and `say_hello`; the listening side calls `take_hello`. With these messages, each side
    proves to the other that it knows the key (`connections/proof.py`).
    """

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
        """Largest number of bytes of JSON in a message. The owner sets it to `MESSAGE_BYTES` when the peer has proved the key."""

    def fileno(self) -> int:
        """Return the file descriptor of the socket, as a selector needs it."""
        return self._end.fileno()

    @property
    def local(self) -> bool:
        """Whether the connection is a Unix socket: then the peer is on this host, and file descriptors can be sent to it."""
        return self._end.family == socket.AF_UNIX

    @property
    def sending(self) -> bool:
        """Whether there are bytes that `flush` must still send."""
        return bool(self._outgoing)

    def send(
        self, message: Mapping[str, Any], payload: memoryview | None = None, descriptor: int | None = None
    ) -> None:
        """Send a message, with a file descriptor if one is given. Raises EOFError if the peer has closed the connection.

        `payload` is not copied, so it must not change until the peer has acknowledged the message.
        """
        content = json.dumps(message, separators=(",", ":")).encode("ascii")
        size = 0 if payload is None else payload.nbytes
        data = memoryview(_HEADER.pack(len(content), size) + content)
        if descriptor is not None:
            try:
                # Descriptors are sent only with a short message on a new connection, so the socket accepts some bytes immediately.
                sent = socket.send_fds(self._end, [data], [descriptor])
            except OSError:
                raise EOFError from None
            data = data[sent:]
        self._outgoing.append(data)
        if payload is not None and size:
            self._outgoing.append(payload.cast("B"))
        self.flush()

    def flush(self) -> None:
        """Send remaining bytes, as many as the socket accepts now. Raises EOFError if the peer has closed the connection."""
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
        """Send the first message of the connecting side, which asks the peer to prove that it knows the key."""
        self._challenge = Challenge(key)
        self.send({"nonce": self._challenge.nonce})

    def proves(self, message: Mapping[str, Any]) -> bool:
        """Check the peer's first message on the connecting side. Returns true for it, and false for all later messages.

        After true, the caller calls `say_hello`. Raises BadFrame if the first message has no valid proof.
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
        """Send the second message of the connecting side, the hello: its own proof, and `values` that the peer must know."""
        assert self._session is not None, "the peer has proved that it knows the key"
        self.send({"hello": {**values, "proof": self._session.sign(_as_proved(values))}}, descriptor=descriptor)

    def take_hello(self, message: Mapping[str, Any], key: str) -> dict[str, Any] | None:
        """Process the first two messages of a peer on the listening side.

        The first call answers the peer's first message with a proof, and returns None. The second call returns the values of the hello.
        Raises BadFrame if the peer does not prove that it knows the key.
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
        """Return the messages that have arrived completely.

        Raises EOFError if the peer has closed the connection, BadFrame for a malformed message or an unexpected descriptor.
        """
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
        """Return the file descriptor that the peer has sent, or None. The caller must close it."""
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
    """Return whether a value of a message is a list of token ids: integers from 0 on."""
    return isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value)


def listen(address: str, key: str = "transfer_address") -> socket.socket:
    """Return a socket that listens at `unix:PATH`, which only processes of this user can reach, or at `HOST:PORT`.

    A socket file that a dead process has left at the path is replaced. Raises BadInput, with the name of the setting `key`, if it is not
    possible to listen there.
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
    """Remove the socket file `path` if no process listens at it. Raises ValueError if a process does, and if it is another kind of file."""
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise ValueError("a file that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end, _short_path(path) as name:
        end.setblocking(False)
        try:
            end.connect(name)
        except BlockingIOError:  # The queue of the listening process is full, so a process does listen there.
            pass
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ValueError("another process listens there")


def start_connecting(address: str) -> socket.socket | None:
    """Begin to connect to an address. Returns a socket that is connected or still connecting, or None if that fails immediately."""
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
        if path:  # For a Unix socket this means that the queue of the listening process is full.
            end.close()
            return None
    except OSError:
        end.close()
        return None
    return end


@contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Give a path of a socket file that is short enough for a socket's address.

    A path that is too long is replaced by `/proc/self/fd/N/NAME`, where N is a file descriptor of the folder, for the time of the context.
    """
    if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
