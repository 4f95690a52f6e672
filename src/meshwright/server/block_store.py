"""The process of `meshwright cache`: a store of cache blocks in host memory, which several engines share.

Engines put blocks into the store under names, and get them back. The name is the identity of the engine's weights and a digest of the
prompt up to the end of the block.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import xxhash

from meshwright.connections.accept import Acceptor
from meshwright.connections.limits import TRANSFERS, raise_file_limit
from meshwright.connections.table import ConnectionTable
from meshwright.server.frames import MESSAGE_BYTES, BadFrame, Frame, FrameSocket, listen
from meshwright.server.staging import map_staging, memory_file

COPY_SECONDS = 30.0
"""If an engine has not copied blocks that it asked for within this time, in seconds, its connection is closed."""
TICK_SECONDS = 1.0
"""Longest time of one `StoreServer.step`, in seconds."""


class BlockStore:
    """A store of blocks of `block_bytes` bytes each, in memory of at most `most_bytes` (but at least one block).

    If the store is full, a new block replaces the least recently used block that no engine is reading.
    """

    def __init__(self, block_bytes: int, most_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.slots = max(1, most_bytes // block_bytes)
        self.descriptor, self._memory = memory_file(self.slots * block_bytes)
        self._free = list(range(self.slots - 1, -1, -1))
        self._blocks: OrderedDict[str, tuple[int, str]] = OrderedDict()
        """`(slot, checksum)` of each block by name, the least recently used first."""
        self._names: dict[int, str] = {}
        """Name of each block by slot."""
        self._readers = [0] * self.slots
        """For each slot, the number of engines that are reading it."""

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def read(self) -> int:
        """Number of slots that engines are reading."""
        return sum(map(bool, self._readers))

    def content(self, slot: int) -> memoryview:
        """The memory of a slot."""
        return self._memory[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def begin_read(self, names: Sequence[str]) -> list[tuple[int, str]]:
        """Return `(slot, checksum)` of the blocks `names`, up to the first block that is not stored.

        These slots are not replaced until the caller has called `end_read` for each.
        """
        found = []
        for name in names:
            if name not in self._blocks:
                break
            self._blocks.move_to_end(name)
            found.append(self._blocks[name])
        for slot, _ in found:
            self._readers[slot] += 1
        return found

    def end_read(self, slot: int) -> None:
        """Note that an engine has copied a slot."""
        self._readers[slot] -= 1

    def put(self, name: str, content: memoryview, checksum: str) -> bool:
        """Store a block. Returns false if its checksum is wrong, or if engines are reading all slots."""
        if name in self._blocks:
            self._blocks.move_to_end(name)
            return True
        if xxhash.xxh3_64_hexdigest(content) != checksum:
            return False
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return False
        self.content(slot)[:] = content
        self._blocks[name] = (slot, checksum)
        self._names[slot] = name
        return True

    def _evict(self) -> int | None:
        for name, (slot, _) in self._blocks.items():
            if not self._readers[slot]:
                del self._blocks[name], self._names[slot]
                return slot
        return None

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class StoreConnection:
    """The connection of an engine, with the slots that the engine is reading."""

    def __init__(self, end: socket.socket) -> None:
        self.frames = FrameSocket(end)
        self.heard = time.monotonic()
        self.identity: str | None = None
        """`PrefixBlocks.identity` of the engine. None until the engine has proved the key."""
        self.memory: memoryview | None = None
        """The engine's staging memory, if the engine is on this host; else None."""
        self.reading: list[int] = []
        """Slots that the engine is reading."""


class StoreServer:
    """Serves one store to engines. The store has the block size of the first engine that connects."""

    def __init__(self, listening: socket.socket, key: str, most_bytes: int) -> None:
        self._listening = listening
        self._key = key
        self._most_bytes = most_bytes
        self._acceptor = Acceptor(listening)
        self._table: ConnectionTable[StoreConnection] = ConnectionTable(TRANSFERS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ, self._accept)
        self.store: BlockStore | None = None
        self.connections: list[StoreConnection] = []

    def step(self, seconds: float = TICK_SECONDS) -> None:
        """Wait at most `seconds` for messages or new connections, and process them. Also closes connections that are late."""
        for connection in self._table.late():
            self._close(connection)
        for connection in list(self.connections):
            if connection.reading and time.monotonic() > connection.heard + COPY_SECONDS:
                self._close(connection)
                continue
            sending = selectors.EVENT_WRITE if connection.frames.sending else 0
            self._selector.modify(connection.frames, selectors.EVENT_READ | sending, partial(self._serve, connection))
        for key, events in self._selector.select(seconds):
            key.data(events)

    def _accept(self, events: int) -> None:
        for end in self._acceptor.accept():
            connection = StoreConnection(end)
            closed = self._table.add(connection, TRANSFERS.head_seconds)
            if closed is connection:
                end.close()
                continue
            if closed is not None:
                self._close(closed)
            self.connections.append(connection)
            self._selector.register(connection.frames, selectors.EVENT_READ, partial(self._serve, connection))

    def _serve(self, connection: StoreConnection, events: int) -> None:
        if connection not in self.connections:  # It was closed in this step, to make room for another connection.
            return
        try:
            connection.frames.flush()
            if events & selectors.EVENT_READ:
                for frame in connection.frames.receive():
                    self._take(connection, frame)
        except (EOFError, BadFrame, AttributeError, IndexError, KeyError, TypeError, ValueError):
            self._close(connection)

    def _take(self, connection: StoreConnection, frame: Frame) -> None:
        message = frame.message
        connection.heard = time.monotonic()
        if connection.identity is None:
            if (hello := connection.frames.take_hello(message, self._key)) is not None:
                self._greet(connection, hello)
        elif "get" in message:
            self._answer(connection, message)
        elif "copied" in message:
            self._end_reads(connection, message["copied"])
        else:
            self._put(connection, message, frame.payload)

    def _greet(self, connection: StoreConnection, hello: Mapping[str, Any]) -> None:
        """Answer an engine that has proved the key, and map its staging memory if it is on this host."""
        self._table.keep(connection)
        size = hello["block_bytes"]
        frames = connection.frames
        if self.store is None:
            self.store = BlockStore(size, self._most_bytes)
        if size != self.store.block_bytes:
            raise BadFrame("blocks of another size")
        if frames.local:
            descriptor = frames.take_descriptor()
            if descriptor is None:
                raise BadFrame("staging memory is missing")
            connection.memory = map_staging(descriptor, hello["slots"] * size)
        connection.identity = hello["identity"]
        frames.limit = MESSAGE_BYTES
        frames.send({"welcome": self.store.slots}, descriptor=self.store.descriptor if frames.local else None)

    def _answer(self, connection: StoreConnection, message: Mapping[str, Any]) -> None:
        """Send the slots of the requested blocks, up to the first block that is not stored.

        These blocks are not replaced until they are copied or the connection ends.
        """
        store = self._opened_store
        frames = connection.frames
        most = len(message["names"]) if frames.local else MESSAGE_BYTES // store.block_bytes
        names = [f"{connection.identity}/{name}" for name in message["names"][:most]]
        found = store.begin_read(names)
        slots = [slot for slot, _ in found]
        payload = None
        if frames.local:
            connection.reading += slots
        else:
            payload = memoryview(b"".join(store.content(slot) for slot in slots))
            for slot in slots:
                store.end_read(slot)
        checksums = [checksum for _, checksum in found]
        frames.send({"found": message["get"], "slots": slots, "checksums": checksums}, payload)

    def _end_reads(self, connection: StoreConnection, slots: Sequence[int]) -> None:
        for slot in slots:
            connection.reading.remove(slot)
            self._opened_store.end_read(slot)

    def _put(self, connection: StoreConnection, message: Mapping[str, Any], payload: bytearray) -> None:
        """Store the blocks of a message, up to the first block that is damaged or has no room. Then acknowledge the message."""
        size = self._opened_store.block_bytes
        start, count = message["slots"]
        content = memoryview(payload)
        if connection.memory is not None:
            content = connection.memory[start * size : (start + count) * size]
        names = message["put"]
        checksums = message["checksums"]
        if not len(names) == len(checksums) == count or content.nbytes != count * size or start < 0:
            raise BadFrame("blocks without their content")
        for index, name in enumerate(names):
            block = content[index * size : (index + 1) * size]
            if not self._opened_store.put(f"{connection.identity}/{name}", block, checksums[index]):
                break
        connection.frames.send({"stored": [start, count]})

    @property
    def _opened_store(self) -> BlockStore:
        assert self.store is not None
        return self.store

    def _close(self, connection: StoreConnection) -> None:
        self._selector.unregister(connection.frames)
        for slot in connection.reading:
            self._opened_store.end_read(slot)
        connection.frames.close()
        self.connections.remove(connection)
        self._table.remove(connection)

    def close(self) -> None:
        """Close all connections and the listening socket."""
        for connection in list(self.connections):
            self._close(connection)
        self._selector.close()
        self._acceptor.close()
        self._listening.close()
        if self.store is not None:
            self.store.close()


def run_store(address: str, key: str, most_bytes: int, say: Callable[[str], None]) -> None:
    """Run a store at `address` until SIGTERM or Ctrl-C.

    `say` prints a line when engines can connect, and a line at the end. Raises BadInput if it is not possible to listen at the address.
    """
    raise_file_limit()
    server = StoreServer(listen(address, "address"), key, most_bytes)
    stopped = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.append(True))
    say(f"keeping cache blocks at {address}")
    while not stopped:
        server.step()
    blocks, read = (0, 0) if server.store is None else (len(server.store), server.store.read)
    server.close()
    say(f"kept {blocks} blocks, {read} being read")
