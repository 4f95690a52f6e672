"""Sends snapshots between hosts: a server beside each agent, and its clients. Torch-free.

Clients are writers, and ranks that resume. First both sides prove that they know the job's token, which is never sent
(`connections/proof.py`): a line with the client's nonce, and one with the server's nonce and proof. From then on every line begins with its
proof. A request is a line of JSON, and so is every answer, which has `error` where the request is refused. Operations:

    names    the complete snapshots of the host's ranks, and the complete `copies` of another host's
    path     the path of a snapshot's memory, which processes of the host map
    memory   how much of the host's memory copies of another host's snapshots take (`bytes`)
    open     a snapshot for reading; its record follows (`bytes`)
    read     bytes of the file that the opened snapshot makes; they follow
    store    a copy: after the answer the client sends the file block by block, each with its digest (8 bytes), then a line with the
             size of the record, and the record

The server compares each block with its digest when it arrives. A copy counts when the record has arrived and agrees with these digests.
Digests detect damage; blocks have no proof, so whoever can change bytes on the way can change a snapshot (docs/design/security.md).
"""

from __future__ import annotations

import io
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

import xxhash

from meshwright.checkpoint.format.digests import block_digest
from meshwright.checkpoint.format.files import BLOCK_BYTES, FileRecord
from meshwright.checkpoint.format.header import HEADER_LIMIT
from meshwright.checkpoint.memory.file_image import FileImage
from meshwright.checkpoint.memory.record import SnapshotName, SnapshotRecord
from meshwright.checkpoint.memory.snapshots import OpenSnapshot, SnapshotMemory, parse_name, plain_name
from meshwright.connections.accept import Acceptor
from meshwright.connections.limits import SNAPSHOTS
from meshwright.connections.proof import Challenge, ProofSession, WrongProof, answer_challenge
from meshwright.connections.table import ConnectionTable
from meshwright.spec.errors import Damaged, MeshwrightError

SERVER_VARIABLE = "MESHWRIGHT_SNAPSHOT_SERVER"
"""Environment variable of ranks with HOST:PORT of their host's snapshot server."""
LINE_BYTES = 8 << 10
"""Maximum number of bytes of a line."""
RECORD_BYTES = 1 << 30
"""Maximum number of bytes of a record."""
DATA_BYTES = 1 << 44
"""Maximum number of bytes of a snapshot's data."""
PROOF_BYTES = 65
"""Bytes of a line's proof and the space behind it."""
IDLE_SECONDS = SNAPSHOTS.idle_seconds
"""How long a connection may send and take nothing."""
CONNECT_SECONDS = 5.0
"""How long it may take to connect."""
PIECE_BYTES = 1 << 20
"""Bytes that are sent at a time; between two of them the sender waits as its rate requires."""
DIGEST_BYTES = 8


class TransportFailure(ConnectionError):
    """The other end refuses, is lost, or sends what does not agree with its digest."""


class SnapshotServer:
    """Serves the snapshots of one host on a listening socket, each connection in a thread."""

    def __init__(self, listener: socket.socket, token: str, memory: SnapshotMemory) -> None:
        self._listener = listener
        self._token = token
        self._memory = memory
        self._acceptor = Acceptor(listener)
        self._table: ConnectionTable[socket.socket] = ConnectionTable(SNAPSHOTS)
        self._lock = threading.Lock()
        """Guards the table; one thread accepts, those of connections end them."""

    def serve(self, seconds: float) -> None:
        """Accept connections that arrive within `seconds`, and close those that have not shown the token in time."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for accepted in self._acceptor.accept() if poll.poll(1000 * seconds) else ():
            with self._lock:
                closed = self._table.add(accepted, SNAPSHOTS.head_seconds)
            if closed is not None and closed is not accepted:
                _end(closed)
            if closed is accepted:
                accepted.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()
            except RuntimeError:  # the system has no room for a thread
                self._forget(accepted)
                accepted.close()
        with self._lock:
            late = self._table.late()
        for connection in late:
            _end(connection)

    def close(self) -> None:
        """Close the descriptor in reserve; the listening socket is the caller's."""
        self._acceptor.close()

    def _serve(self, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(True)
            with accepted, closing(_Stream(accepted, SNAPSHOTS.head_seconds)) as stream:
                _Session(stream, self._token, self._memory, partial(self._keep, accepted)).run()
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            pass  # the client is lost, or sends nonsense
        finally:
            self._forget(accepted)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._table.remove(connection)

    def _keep(self, connection: socket.socket) -> None:
        """Note that a client has shown the token: it makes no room for others. Raises ConnectionError if it has done so."""
        with self._lock:
            if connection not in self._table:
                raise ConnectionError("another connection took its place")
            self._table.keep(connection)


def _end(connection: socket.socket) -> None:
    """End a connection, whose thread closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Session:
    """The requests of one connection."""

    def __init__(self, stream: _Stream, token: str, memory: SnapshotMemory, trust: Callable[[], None]) -> None:
        """`trust` is called once the client has shown the token."""
        self._stream = stream
        self._token = token
        self._memory = memory
        self._trust = trust
        self._opened: OpenSnapshot | None = None

    def run(self) -> None:
        hello = self._stream.read_line() or {}
        answer, session = answer_challenge(self._token, hello.get("nonce"))
        self._stream.send_line(answer)
        self._stream.session = session
        request = self._stream.read_line()
        self._trust()
        self._stream.set_timeout(IDLE_SECONDS)
        try:
            while request is not None:
                self._answer(request)
                request = self._stream.read_line()
        finally:
            if self._opened is not None:
                self._opened.close()

    def _answer(self, request: dict[str, Any]) -> None:
        match request["op"]:
            case "names":
                own, copies = ([plain_name(name) for name in names] for names in self._memory.names())
                self._stream.send_line({"names": own, "copies": copies})
            case "path":
                self._stream.send_line({"path": self._memory.path(parse_name(request["name"]))})
            case "memory":
                self._stream.send_line({"bytes": self._memory.slot_bytes})
            case "open":
                self._open(parse_name(request["name"]))
            case "read":
                self._read(request["start"], request["bytes"])
            case "store":
                self._store(parse_name(request["name"]), request["header_bytes"], request["data_bytes"])
            case _:
                self._stream.send_line({"error": "no such operation"})

    def _open(self, name: SnapshotName) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = self._memory.open(name)
        if self._opened is None:
            self._stream.send_line({"error": "the snapshot is not here"})
            return
        record = self._opened.record.encode()
        self._stream.send_line({"bytes": len(record)})
        self._stream.send(record)

    def _read(self, start: object, count: object) -> None:
        if self._opened is None:
            self._stream.send_line({"error": "no snapshot is open"})
            return
        image = self._opened.image
        start = _number(start, image.bytes)
        count = _number(count, min(BLOCK_BYTES, image.bytes))
        data = memoryview(bytearray(min(count, image.bytes - start)))
        image.read(start, data)
        self._stream.send_line({"bytes": len(data)})
        self._stream.send(data)

    def _store(self, name: SnapshotName, header_bytes: object, data_bytes: object) -> None:
        header_bytes = _number(header_bytes, HEADER_LIMIT)
        data_bytes = _number(data_bytes, DATA_BYTES)
        try:
            with self._memory.receive(name, data_bytes) as copy:
                self._stream.send_line({"ready": True})
                digests = self._receive_blocks(header_bytes, copy.data)
                line = self._stream.read_line() or {}
                record = bytearray(_number(line.get("record_bytes"), RECORD_BYTES))
                self._stream.receive(memoryview(record))
                _check_record(bytes(record), name, str(line.get("digest")), digests)
                copy.complete(bytes(record))
        except MeshwrightError as refused:
            self._stream.send_line({"error": str(refused)})
            return
        self._stream.send_line({"stored": True})

    def _receive_blocks(self, header_bytes: int, data: memoryview) -> tuple[str, ...]:
        """Receive a file, whose bytes behind the header go to `data`; returns the digests of its blocks.

        A block that does not agree with its digest has an empty one: the client takes no answer before it has sent everything.
        """
        digests = []
        for start in range(0, header_bytes + len(data), BLOCK_BYTES):
            end = min(start + BLOCK_BYTES, header_bytes + len(data))
            if start >= header_bytes:
                block = data[start - header_bytes : end - header_bytes]
                self._stream.receive(block)
            else:
                block = memoryview(bytearray(end - start))
                self._stream.receive(block)
                behind = block[min(header_bytes, end) - start :]
                data[: len(behind)] = behind
            sent = bytearray(DIGEST_BYTES)
            self._stream.receive(memoryview(sent))
            digest = block_digest(block)
            digests.append(digest if sent.hex() == digest else "")
        return tuple(digests)


class SnapshotClient:
    """A connection to a snapshot server. Raises TransportFailure for whatever goes wrong. One thread at a time."""

    def __init__(self, address: str, token: str, *, seconds: float = IDLE_SECONDS) -> None:
        self._address = address
        host, _, port = address.rpartition(":")
        with self._failures():
            connected = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stream = _Stream(connected, seconds)
            try:
                challenge = Challenge(token)
                self._stream.send_line({"nonce": challenge.nonce})
                answer = self._stream.read_line() or {}
                self._stream.session = challenge.session(answer.get("nonce"), answer.get("proof"))
            except BaseException:
                self._stream.close()
                raise

    def names(self) -> tuple[list[SnapshotName], list[SnapshotName]]:
        """The complete snapshots of the host's ranks, and the complete copies of another host's."""
        with self._failures():
            answer = self._request("names", limit=RECORD_BYTES)
            own, copies = ([parse_name(value) for value in answer[key]] for key in ("names", "copies"))
            return own, copies

    def path(self, name: SnapshotName) -> str | None:
        """The path of a snapshot's memory on the server's host; None if it is not there."""
        with self._failures():
            path = self._request("path", name=plain_name(name))["path"]
            return None if path is None else str(path)

    def slot_bytes(self) -> int:
        """Bytes of the host's memory that copies of another host's snapshots take."""
        with self._failures():
            return _number(self._request("memory")["bytes"], DATA_BYTES)

    def open(self, name: SnapshotName) -> SnapshotRecord:
        """Open a snapshot for `read`; returns its record."""
        with self._failures():
            data = bytearray(_number(self._request("open", name=plain_name(name))["bytes"], RECORD_BYTES))
            self._stream.receive(memoryview(data))
            record = SnapshotRecord.decode(bytes(data))
            if record is None or record.name != name:
                raise TransportFailure("the record is of another snapshot")
            return record

    def read(self, start: int, target: memoryview) -> None:
        """Fill `target` with bytes of the opened snapshot's file from `start` on."""
        with self._failures():
            if self._request("read", start=start, bytes=len(target))["bytes"] != len(target):
                raise TransportFailure("the file has another size")
            self._stream.receive(target)

    def store(
        self,
        name: SnapshotName,
        image: FileImage,
        describe: Callable[[FileRecord | None], bytes],
        *,
        bytes_per_second: float,
        unchanged: Callable[[], bool] = lambda: True,
        inspect: Callable[[int, memoryview], object] = lambda offset, data: None,
    ) -> None:
        """Store a copy of a snapshot on the host. `describe` returns the snapshot's record, given that of its file.

        `inspect` is called before with each part of the data, once and in order: with its offset and the part. At most `bytes_per_second`
        are sent on average. The copy is given up when the memory of `image` is no longer `unchanged`.
        """
        with self._failures():
            self._request("store", name=plain_name(name), header_bytes=len(image.header), data_bytes=len(image.data))
            pace = Pace(bytes_per_second)
            digests = []
            for index in range(image.blocks):
                block = image.block(index)
                digests.append(block_digest(block))
                inspect(*image.data_of_block(index))
                for start in range(0, len(block), PIECE_BYTES):
                    piece = block[start : start + PIECE_BYTES]
                    pace.wait(len(piece))
                    if not unchanged():
                        raise TransportFailure("the next save began before the copy was complete")
                    self._stream.send(piece)
                self._stream.send(bytes.fromhex(digests[-1]))
            record = describe(FileRecord(image.bytes, tuple(digests)) if digests else None)
            if not unchanged():
                raise TransportFailure("the next save began before the copy was complete")
            self._stream.send_line({"record_bytes": len(record), "digest": xxhash.xxh3_128(record).hexdigest()})
            self._stream.send(record)
            self._checked(self._stream.read_line())

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def _request(self, operation: str, *, limit: int = LINE_BYTES, **fields: Any) -> dict[str, Any]:
        self._stream.send_line({"op": operation, **fields})
        return self._checked(self._stream.read_line(limit))

    def _checked(self, answer: dict[str, Any] | None) -> dict[str, Any]:
        if answer is None:
            raise TransportFailure("it closed the connection")
        if "error" in answer:
            raise TransportFailure(str(answer["error"])[:200])
        return answer

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise every failure as TransportFailure that names the server."""
        try:
            yield
        except (OSError, ValueError, TypeError, KeyError) as error:
            text = (
                "it sends and takes nothing" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            )
            raise TransportFailure(f"snapshot server {self._address}: {text}") from error


class Pace:
    """Delays a sender so that it sends at most `bytes_per_second` on average since the start."""

    def __init__(
        self,
        bytes_per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._start = clock()
        self._sent = 0

    def wait(self, count: int) -> None:
        """Return when the bytes sent so far have taken their time; `count` more are sent next."""
        early = self._start + self._sent / self._rate - self._clock()
        if early > 0:
            self._sleep(early)
        self._sent += count


class _Stream:
    """Lines of JSON and bytes over a socket."""

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        self._socket = connected
        self.session: ProofSession | None = None
        """Proofs of lines, once nonces are exchanged."""
        self.set_timeout(seconds)
        self._reader = io.BufferedReader(connected.makefile("rb", buffering=0), 1 << 16)

    def set_timeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def read_line(self, limit: int = LINE_BYTES) -> dict[str, Any] | None:
        """The next line; None at the end of the connection.

        Raises WrongProof for a line without its proof, ValueError for one that is too long or no JSON object.
        """
        line = self._reader.readline(limit)
        if not line:
            return None
        if self.session is not None:
            proof = line[: PROOF_BYTES - 1]
            line = line[PROOF_BYTES:]
            if not self.session.accepts(proof.decode("latin-1"), line):
                raise WrongProof("a line without its proof: the other side has another token")
        value = json.loads(line) if line.endswith(b"\n") else None
        if not isinstance(value, dict):
            raise ValueError("expected a line with a JSON object")
        return value

    def send_line(self, value: dict[str, Any]) -> None:
        line = json.dumps(value).encode() + b"\n"
        self.send(line if self.session is None else self.session.sign(line).encode() + b" " + line)

    def send(self, data: bytes | memoryview) -> None:
        self._socket.sendall(data)

    def receive(self, target: memoryview) -> None:
        """Fill `target`. Raises TransportFailure if the connection ends before."""
        while target:
            count = self._reader.readinto(target)
            if not count:
                raise TransportFailure("the connection ended")
            target = target[count:]

    def close(self) -> None:
        with suppress(OSError):
            self._reader.close()
        self._socket.close()


def _check_record(record: bytes, name: SnapshotName, digest: str, blocks: tuple[str, ...]) -> None:
    """Raise Damaged unless `record` has its digest and describes the snapshot `name` with these block digests."""
    if "" in blocks:
        raise Damaged(f"block {blocks.index('')} does not agree with its digest")
    decoded = SnapshotRecord.decode(record) if xxhash.xxh3_128(record).hexdigest() == digest else None
    stated = decoded.file.blocks if decoded is not None and decoded.file is not None else ()
    if decoded is None or decoded.name != name or stated != blocks:
        raise Damaged("the record does not agree with its digest, or with the data")


def _number(value: object, most: int) -> int:
    """`value` if it is a whole number from 0 to `most`. Raises ValueError for another value."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"expected a number from 0 to {most}")
    return value
