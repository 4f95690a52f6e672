"""Client of a store of cache blocks: fetches the beginnings of prompts, and publishes the blocks that the engine
computes.

Nothing waits for the store longer than `FETCH_SECONDS`; blocks that it does not have are computed. A computed block is not sent to the
store if staging memory has no room for it, or if the store does not answer then.
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
"""Longest time that a prompt waits for the store."""
RETRY_SECONDS = 0.5


@dataclass(eq=False)
class Fetch:
    """A prompt whose first blocks are requested from the store."""

    digests: Sequence[bytes]
    first: int
    """Index of the first requested block."""
    done: Callable[[], None]
    """Called once the stored blocks are in the cache, or cannot be fetched."""
    since: float


class StoreClient:
    """Connection of an engine to a store of blocks."""

    def __init__(self, blocks: PrefixBlocks, address: str, key: str) -> None:
        self._blocks = blocks
        self._address = address
        self._key = key
        self.frames: FrameSocket | None = None
        self._staging: Staging | None = None
        self._memory: memoryview | None = None
        """Memory of a store on this host."""
        self.usable = False
        self._identity = ""
        self._retry = 0.0
        self._fetches: dict[int, Fetch] = {}
        self._numbers = itertools.count()
        self._computing: dict[int, tuple[UnsentBlocks, list[str]]] = {}
        """Blocks to be published, and the names of all blocks, of prompts that are computed, by the engine's number."""
        self.fetched_blocks = self.damaged_blocks = self.stored_blocks = 0

    @property
    def unacknowledged_blocks(self) -> int:
        """Blocks in staging memory that the store has not copied yet."""
        return 0 if self._staging is None else self._staging.used

    def use_identity(self, identity: str) -> None:
        """Exchange blocks of these weights from now on."""
        self._lose(retry=0.0)
        self._forget()
        self._identity = identity

    def fetch(self, prompt: Sequence[int], salt: str, done: Callable[[], None]) -> None:
        """Copy the stored blocks of a prompt into the cache, then call `done`; at once if there is nothing to fetch."""
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
        """Publish the blocks of a prompt that are not cached yet, once the request `number` of the engine has computed
        them."""
        digests = self._blocks.digests(prompt, salt)
        missing = self._blocks.missing(digests)
        if missing:  # also without a store: it may answer by then
            unsent = self._blocks.unsent(digests, len(digests) - missing)
            self._computing[number] = unsent, [key.hex() for key in self._blocks.keys(prompt, salt)]

    def after_step(self, updates: Sequence[Update]) -> None:
        """Send the blocks of prompts that have their first token, as far as staging memory has room.

        They are not sent earlier: if the logits turn out not to be finite, the blocks must not reach other engines.
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
            unsent.release()  # what staging memory has no room for

    def _send_run(self, unsent: UnsentBlocks, names: Sequence[str]) -> bool:
        """Send some blocks; returns whether there was room for any."""
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
        """Connect if there is no connection, and close one to a store that does not answer."""
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
        except (EOFError, OSError):  # the store has closed, or files or memory are exhausted
            self._lose()

    def serve(self, *, readable: bool) -> None:
        """Send the remaining bytes and process the store's messages; a wrong message ends the connection."""
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
                except OSError:  # memory is exhausted
                    raise EOFError from None
            self.usable = True

    def _copy(self, frames: FrameSocket, message: Mapping[str, Any], payload: bytearray) -> None:
        """Copy the blocks that the store has into the cache, up to the first with a wrong checksum."""
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
        finally:  # the store may have ended, or sent something wrong
            if fetch is not None:
                fetch.done()

    def _enter(self, fetch: Fetch, memory: memoryview, slots: Sequence[int], checksums: Sequence[str]) -> None:
        """Copy blocks in `slots` of a memory into the cache, if it has room, up to the first with a wrong checksum."""
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
                if table is not None:  # else it was computed meanwhile
                    self._blocks.write([table], content)
                    reserved.enter(index)
                    self.fetched_blocks += 1
        finally:
            reserved.release()

    def close(self) -> None:
        """End the connection; prompts that wait for it, and blocks to be published, are forgotten."""
        self._fetches.clear()
        self._lose()
        self._forget()

    def _lose(self, retry: float | None = None) -> None:
        """End the connection; prompts that wait for it go on."""
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
        with ExitStack() as stack:  # calls all, in order, even if one raises
            for fetch in reversed(fetches):
                stack.callback(fetch.done)

    def _forget(self) -> None:
        """Publish nothing of the prompts that are computed now."""
        for unsent, _ in self._computing.values():
            unsent.release()
        self._computing.clear()
