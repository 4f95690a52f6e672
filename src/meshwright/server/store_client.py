"""The engine's client of a store of cache blocks (`server.block_store`).

It fetches the blocks at the beginning of prompts from the store, and sends the prompt blocks that the engine computes to the store. A
prompt waits for the store for at most `FETCH_SECONDS`; the engine computes the blocks that the store does not have. A computed block is
not sent if the staging memory has no room for it, or if there is no connection to the store.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from meshwright.server.frames import MESSAGE_BYTES, BadFrame, Frame, FrameSocket, start_connecting
from meshwright.server.staging import Staging, map_staging

if TYPE_CHECKING:
    from meshwright.policies.moving_blocks import UnsentBlocks
    from meshwright.serve.generation import Update
    from meshwright.serve.prefix_blocks import PrefixBlocks

FETCH_SECONDS = 2.0
"""If the store has not answered a fetch after this time, in seconds, the connection to it is closed."""
RETRY_SECONDS = 0.5
"""Time between two attempts to connect to the store, in seconds."""


@dataclass(eq=False)
class Fetch:
    """A prompt whose blocks were requested from the store."""

    digests: Sequence[bytes]
    """Digests of the full blocks of the prompt."""
    first: int
    """Index of the first block that was requested; the blocks before it are cached."""
    done: Callable[[], None]
    """It is called when the stored blocks are in the cache, or cannot be fetched."""
    since: float
    """Time of the request."""


class StoreClient:
    """The connection of one engine to a store of blocks."""

    def __init__(self, blocks: PrefixBlocks, address: str, key: str) -> None:
        self._blocks = blocks
        self._address = address
        self._key = key
        self.frames: FrameSocket | None = None
        self._staging: Staging | None = None
        self._memory: memoryview | None = None
        """The store's memory, if the store is on this host; else None."""
        self.usable = False
        self._identity = ""
        self._retry = 0.0
        self._fetches: dict[int, Fetch] = {}
        self._numbers = itertools.count()
        self._computing: dict[int, tuple[UnsentBlocks, list[str]]] = {}
        """By request number, for prompts that the engine computes: the blocks to send to the store, and the names of all its blocks."""
        self.fetched_blocks = self.damaged_blocks = self.stored_blocks = 0

    @property
    def unacknowledged_blocks(self) -> int:
        """Number of blocks in the staging memory that the store has not acknowledged yet."""
        return 0 if self._staging is None else self._staging.used

    def use_identity(self, identity: str) -> None:
        """Set a new identity, after the weights have changed, and close the connection. Only blocks of this identity are exchanged."""
        self._lose(retry=0.0)
        self._forget()
        self._identity = identity

    def fetch(self, prompt: Sequence[int], salt: str, done: Callable[[], None]) -> None:
        """Copy the blocks of a prompt from the store into the cache, then call `done`.

        `done` is called immediately if all blocks are cached, or if the store is not connected.
        """
        digests = self._blocks.digests(prompt, salt)
        missing = self._blocks.missing(digests)
        if not self.usable or not missing or self.frames is None:
            done()
            return
        number = next(self._numbers)
        keys = self._blocks.keys(prompt, salt)
        self._fetches[number] = Fetch(digests, len(digests) - missing, done, time.monotonic())
        try:
            self.frames.send({"get": number, "names": [key.hex() for key in keys[len(keys) - missing :]]})
        except EOFError:
            self._lose()

    def publish(self, number: int, prompt: Sequence[int], salt: str) -> None:
        """Send the blocks of a prompt to the store after the engine's request `number` has computed them.

        Blocks that are cached already are not sent.
        """
        digests = self._blocks.digests(prompt, salt)
        missing = self._blocks.missing(digests)
        if missing:  # If the store is not connected now, it may be connected when the blocks are computed.
            unsent = self._blocks.unsent(digests, len(digests) - missing)
            self._computing[number] = unsent, [key.hex() for key in self._blocks.keys(prompt, salt)]

    def after_step(self, updates: Sequence[Update]) -> None:
        """Send the blocks of the prompts that got their first token in a step, as far as the staging memory has room.

        They are not sent earlier, because blocks of a prompt whose logits are not finite must not reach other engines.
        """
        for update in updates:
            if (computing := self._computing.pop(update.number, None)) is None or update.reason == "failed":
                continue
            unsent, names = computing
            unsent.extend()
            try:
                while unsent and self._send_run(unsent, names):
                    pass
            except EOFError:
                self._lose()
            unsent.release()  # The staging memory had no room for these blocks, so they are not sent.

    def _send_run(self, unsent: UnsentBlocks, names: Sequence[str]) -> bool:
        """Send some blocks. Returns false if the staging memory is full, or if the store is not connected."""
        staging = self._staging
        frames = self.frames
        size = self._blocks.block_bytes
        if not self.usable or staging is None or frames is None:
            return False
        start, count = staging.take(min(len(unsent), max(1, MESSAGE_BYTES // size)))
        if not count:
            return False
        content = staging.content(start, count)
        index = unsent.next
        self._blocks.read(unsent.take(count), content)
        unsent.copied(count)
        checksums = [xxhash.xxh3_64_hexdigest(content[at : at + size]) for at in range(0, count * size, size)]
        message = {"put": names[index : index + count], "slots": [start, count], "checksums": checksums}
        frames.send(message, None if frames.local else content)
        self.stored_blocks += count
        return True

    def tick(self, now: float) -> None:
        """Close the connection if a fetch has waited for more than `FETCH_SECONDS`. Connect if there is no connection."""
        if any(now > fetch.since + FETCH_SECONDS for fetch in self._fetches.values()):
            self._lose()
        if self.frames is not None or now < self._retry:
            return
        self._retry = now + RETRY_SECONDS
        if (end := start_connecting(self._address)) is None:
            return
        self.frames = FrameSocket(end)
        try:
            self._staging = Staging(self._blocks.block_bytes)
            self.frames.introduce(self._key)
        except (EOFError, OSError):
            # The store has closed the connection, or there are too many open files, or not enough memory.
            self._lose()

    def serve(self, *, readable: bool) -> None:
        """Go on sending, and process the store's messages if the socket is `readable`. A malformed message ends the connection."""
        if self.frames is None:
            return
        try:
            self.frames.flush()
            for frame in [] if not readable else self.frames.receive():
                self._take(self.frames, frame)
        except (EOFError, BadFrame, AttributeError, KeyError, TypeError, ValueError):
            self._lose()

    def _take(self, frames: FrameSocket, frame: Frame) -> None:
        message = frame.message
        if frames.proves(message):
            assert self._staging is not None
            sizes = {"block_bytes": self._blocks.block_bytes, "slots": self._staging.slots}
            descriptor = self._staging.descriptor if frames.local else None
            frames.say_hello({"identity": self._identity, **sizes}, descriptor)
        elif "found" in message:
            self._copy(frames, message, frame.payload)
        elif "stored" in message:
            start, count = message["stored"]
            assert self._staging is not None
            self._staging.give_back(start, count)
        else:
            slots = message["welcome"]
            frames.limit = MESSAGE_BYTES
            if frames.local:
                descriptor = frames.take_descriptor()
                if descriptor is None:
                    raise BadFrame("the store's memory is missing")
                try:
                    self._memory = map_staging(descriptor, slots * self._blocks.block_bytes)
                except OSError:  # There is not enough memory.
                    raise EOFError from None
            self.usable = True

    def _copy(self, frames: FrameSocket, message: Mapping[str, Any], payload: bytearray) -> None:
        """Process the answer to a fetch: copy its blocks into the cache, up to the first block with a wrong checksum."""
        fetch = self._fetches.pop(message["found"], None)
        slots = message["slots"]
        try:
            if fetch is not None and slots:
                memory, starts = (
                    (memoryview(payload), range(len(slots))) if self._memory is None else (self._memory, slots)
                )
                self._enter(fetch, memory, starts, message["checksums"])
            if frames.local:
                frames.send({"copied": slots})
        finally:  # `done` is called even if the store has closed the connection, or has sent a malformed message.
            if fetch is not None:
                fetch.done()

    def _enter(self, fetch: Fetch, memory: memoryview, slots: Sequence[int], checksums: Sequence[str]) -> None:
        """Copy the blocks in `slots` of `memory` into the cache, up to the first block with a wrong checksum.

        Nothing is copied if the cache has no room for them.
        """
        size = self._blocks.block_bytes
        reserved = self._blocks.reserve(fetch.digests[: fetch.first + len(slots)], 0)
        if reserved is None:
            return
        try:
            for index, (slot, checksum) in enumerate(zip(slots, checksums, strict=True), fetch.first):
                content = memory[slot * size : (slot + 1) * size]
                table = reserved.blocks(index)
                if xxhash.xxh3_64_hexdigest(content) != checksum:
                    self.damaged_blocks += 1
                    break
                if table is not None:  # Otherwise the block has been computed in the meantime.
                    self._blocks.write([table], content)
                    reserved.enter(index)
                    self.fetched_blocks += 1
        finally:
            reserved.release()

    def close(self) -> None:
        """Close the connection. Prompts that wait for the store, and blocks to be sent to it, are forgotten."""
        self._fetches.clear()
        self._lose()
        self._forget()

    def _lose(self, retry: float | None = None) -> None:
        """Close the connection, and call `done` of all prompts that wait for the store. `retry` is the time of the next attempt."""
        if self.frames is not None:
            self.frames.close()
        if self._staging is not None:
            self._staging.close()
        self.frames = None
        self._staging = None
        self._memory = None
        self.usable = False
        self._retry = time.monotonic() + RETRY_SECONDS if retry is None else retry
        fetches = list(self._fetches.values())
        self._fetches = {}
        with ExitStack() as stack:  # It calls all functions `done`, in order, even if one of them raises.
            for fetch in reversed(fetches):
                stack.callback(fetch.done)

    def _forget(self) -> None:
        """Forget the blocks of prompts that are being computed, so that they are not sent to the store."""
        for unsent, _ in self._computing.values():
            unsent.release()
        self._computing.clear()
