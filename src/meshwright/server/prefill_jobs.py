"""Remote prefill, on the side of the engine that sends cache blocks: it computes prompts for other engines (receivers).

This engine computes each prompt as a request with one new token per sequence. After each step, it references the new blocks of prompts, so
that the cache keeps them until they are copied. There are two ways to send blocks:

- If the receiver maps this engine's cache, it gets the numbers of the blocks, and copies them itself.
- Otherwise the blocks are copied into staging memory, as far as it has free slots, and sent from there.

The receiver acknowledges the blocks that it has copied. At the end it gets the first token of each sequence. If a connection ends, or the
receiver acknowledges nothing for too long, its prompts are aborted and their blocks are freed.

`server.remote_prefill` is the side of the receiver.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import xxhash

from meshwright.connections.accept import Acceptor
from meshwright.connections.limits import TRANSFERS
from meshwright.connections.table import ConnectionTable
from meshwright.server.frames import MESSAGE_BYTES, BadFrame, Frame, FrameSocket, is_list_of_ids
from meshwright.server.grammar_jobs import GrammarJobs
from meshwright.server.mapped_transfer import MappedSender
from meshwright.server.staging import Staging
from meshwright.server.store_client import StoreClient
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from meshwright.policies.moving_blocks import UnsentBlocks
    from meshwright.serve.engine import Engine
    from meshwright.serve.generation import Update
    from meshwright.serve.prefix_blocks import PrefixBlocks

RUN_BYTES = 32 << 20
"""Largest number of bytes of blocks that one message announces; but a message has at least one block."""
MOST_SEQUENCES = 4096
"""Largest number of sequences of one prompt."""
_PEER_ERRORS = (EOFError, BadFrame, AttributeError, KeyError, OverflowError, TypeError, ValueError)
"""Exceptions that mean that a receiver has disconnected or sent a malformed message."""


@dataclass(frozen=True)
class PrefillRequest:
    """The checked fields of a message `prefill`, with which a receiver asks for the computation of a prompt."""

    tokens: list[int]
    """Token ids of the prompt."""
    salt: str
    """Salt of the prompt's blocks (`policies.batch_request.Request.salt`)."""
    count: int
    """Number of sequences of the prompt."""
    first_block: int
    """Index of the first block that the receiver does not have."""
    options: Mapping[str, Any]
    """Options for `Engine.submit_samples`."""

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> PrefillRequest:
        """Check the fields of a message.

        Raises BadInput for a value that is out of range; BadFrame, KeyError, TypeError or ValueError for a malformed message.
        """
        from meshwright.serve.grammar import Grammar
        from meshwright.serve.sampling_options import SamplingOptions

        tokens = message["tokens"]
        stop_ids = message["stop_ids"]
        grammar = message["grammar"]
        count = message["count"]
        first_block = message["first_block"]
        priority = message["priority"]
        salt = message["salt"]
        if not is_list_of_ids(tokens) or not is_list_of_ids(stop_ids):
            raise BadFrame("tokens and stop_ids: expected lists of token ids")
        if not type(count) is type(first_block) is type(priority) is int:
            raise BadFrame("count, first_block and priority: expected integers")
        if not isinstance(salt, str):
            raise BadFrame("salt: expected text")
        if grammar is not None and not all(isinstance(text, str) for text in grammar):
            raise BadFrame("grammar: expected its notation and text")
        if not 1 <= count <= MOST_SEQUENCES:
            raise BadInput(f"count: expected 1 to {MOST_SEQUENCES}, got {count}")
        options = {
            "sampling": SamplingOptions.from_plain(message["sampling"]),
            "new_tokens": 1,
            "continued_elsewhere": True,
            "stop_ids": stop_ids,
            "grammar": None if grammar is None else Grammar(*grammar),
            "priority": priority,
            "salt": salt,
        }
        return cls(tokens, salt, count, max(0, first_block), options)


class PrefillJob:
    """A prompt that this engine computes for a receiver, with the first token of each of its sequences."""

    def __init__(self, number: int, prompt_tokens: int, unsent: UnsentBlocks, requests: Sequence[int]) -> None:
        self.number = number
        """Number of the prompt, chosen by the receiver."""
        self.prompt_tokens = prompt_tokens
        """Number of tokens of the prompt."""
        self.unsent = unsent
        """References on the computed blocks that are not sent yet."""
        self.requests = list(requests)
        """This engine's request number of each sequence."""
        self.firsts: dict[int, list[Any]] = {}
        """By request number: `[tokens, details]` of the sequence's last update. `tokens` has the first token, or nothing."""
        self.failed = False
        """Whether a sequence has failed on this engine. Then the receiver computes the prompt itself."""

    @property
    def computed(self) -> bool:
        """Whether all sequences have ended, with their first token."""
        return len(self.firsts) == len(self.requests)


class PrefillConnection:
    """The connection to a receiver, with its prompts and the blocks that it has not acknowledged yet."""

    def __init__(self, end: socket.socket, now: float) -> None:
        self.frames = FrameSocket(end)
        self.silent_since = now
        """Time of the receiver's last message; or, if later, the time when the first unacknowledged block was sent."""
        self.staging: Staging | None = None
        """Staging memory for the receiver's blocks. None until the receiver has proved that it knows the key."""
        self.mapped_sender: MappedSender | None = None
        """The blocks that the receiver copies from this engine's cache. None if the receiver cannot map the cache."""
        self.jobs: dict[int, PrefillJob] = {}
        """Unfinished jobs by the receiver's numbers, in the order of their arrival."""
        self.fetching: set[int] = set()
        """Numbers of the prompts that are not submitted yet: a grammar is being compiled, or blocks are being fetched from the store."""
        self.load_due = False
        """Whether a report of the load must be sent after the messages that are still being sent."""

    @property
    def unacknowledged_blocks(self) -> int:
        """Number of blocks that were sent and that the receiver has not acknowledged."""
        return (0 if self.staging is None else self.staging.used) + (
            0 if self.mapped_sender is None else self.mapped_sender.unreturned_blocks
        )

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the receiver's prompts that are not completely computed."""
        return sum(job.prompt_tokens for job in self.jobs.values() if not job.computed)


class PrefillJobs:
    """Computes prompts on one engine, for the receivers that connect to a listening socket."""

    def __init__(
        self,
        engine: Engine,
        blocks: PrefixBlocks,
        listening: socket.socket,
        key: str,
        lease_seconds: float,
        store: StoreClient | None = None,
        grammars: GrammarJobs | None = None,
    ) -> None:
        """Serve receivers that know `key` on the socket `listening`.

        - `lease_seconds`: longest time in which a receiver with unacknowledged blocks may send nothing.
        - `store`: a store from which blocks of prompts are fetched, or None.
        - `grammars`: compiles the grammars of prompts in a thread, while the engine computes steps.
        """
        self._grammars = grammars
        self._engine = engine
        self._blocks = blocks
        self._key = key
        self._lease = lease_seconds
        self._store = store
        self._acceptor = Acceptor(listening)
        self._table: ConnectionTable[PrefillConnection] = ConnectionTable(TRANSFERS)
        self.listening = listening
        self.accepting = True
        """Whether new prompts are accepted."""
        self.connections: list[PrefillConnection] = []
        self._job_of_text: dict[int, PrefillJob | None] = {}
        """By request number of each unfinished sequence: its job, or None if it was aborted."""
        self._identity = ""
        """Identity of this engine's weights and blocks (`PrefixBlocks.identity`)."""
        self.sent_blocks = 0
        """Number of blocks that were sent so far."""

    @property
    def unacknowledged_blocks(self) -> int:
        """Number of blocks that were sent and that receivers have not acknowledged."""
        return sum(connection.unacknowledged_blocks for connection in self.connections)

    def use_identity(self, identity: str) -> None:
        """Set a new identity, after the weights have changed, and close all connections. Only receivers with this identity are served."""
        for connection in list(self.connections):
            self._close(connection)
        self._identity = identity

    def accept(self, *, readable: bool) -> None:
        """Accept new connections if the listening socket is `readable`."""
        if not readable:
            return
        for end in self._acceptor.accept():
            connection = PrefillConnection(end, time.monotonic())
            closed = self._table.add(connection, TRANSFERS.head_seconds)
            if closed is connection:
                end.close()
                continue
            if closed is not None:
                self._close(closed)
            self.connections.append(connection)

    def serve(self, connection: PrefillConnection, *, readable: bool) -> None:
        """Go on sending to a receiver, and process its messages if its socket is `readable`. A malformed message ends the connection."""
        if connection not in self.connections:
            return
        try:
            connection.frames.flush()
            for frame in [] if not readable else connection.frames.receive():
                self._take(connection, frame)
            if connection.staging is not None:
                self._send_blocks(connection)
                if connection.load_due and not connection.frames.sending:
                    self.report_load()
        except _PEER_ERRORS:
            self._close(connection)

    def _take(self, connection: PrefillConnection, frame: Frame) -> None:
        if connection.staging is None:
            if (hello := connection.frames.take_hello(frame.message, self._key)) is not None:
                self._greet(connection, hello)
            return
        actions: Mapping[str, Callable[[PrefillConnection, Any], None]] = {
            "prefill": self._begin,
            "copied": self._free_slots,
            "mapped": self._use_mapping,
            "returned": self._take_back,
            "cancel": self._cancel,
        }
        connection.silent_since = time.monotonic()
        for key, value in frame.message.items():
            actions[key](connection, value)

    def _greet(self, connection: PrefillConnection, hello: Mapping[str, Any]) -> None:
        """Answer a receiver that has proved that it knows the key. If it has another identity, the connection ends."""
        self._table.keep(connection)
        if hello["identity"] != self._identity:
            connection.frames.send({"refused": "other weights, formats or sizes of blocks"})
            raise EOFError
        try:
            staging = Staging(self._blocks.block_bytes)
        except OSError:  # There are too many open files, or there is not enough memory.
            raise EOFError from None
        connection.staging = staging
        connection.frames.limit = MESSAGE_BYTES
        connection.mapped_sender = sender = MappedSender.for_peer(self._blocks.own_blocks, hello.get("host"))
        sizes = {"block_bytes": staging.block_bytes, "slots": staging.slots}
        welcome = {"welcome": sizes} if sender is None else {"welcome": sizes, "cache": sender.offer}
        connection.frames.send(welcome, descriptor=staging.descriptor if connection.frames.local else None)
        self.report_load()

    def _begin(self, connection: PrefillConnection, request: Mapping[str, Any]) -> None:
        """Check a message `prefill`. Then compile its grammar, fetch blocks from the store, and queue the prompt, in this order."""
        number = int(request["job"])
        if number in connection.jobs or number in connection.fetching:
            raise BadFrame(f"another prompt has the number {number}")
        if not self.accepting:
            connection.frames.send({"failed": number, "error": "this engine takes no prompts"})
            return
        try:
            prompt = PrefillRequest.from_message(request)
        except BadInput as error:
            connection.frames.send({"failed": number, "error": str(error)})
            return
        connection.fetching.add(number)
        queue = partial(self._queue, connection, number, prompt)
        begin = queue if self._store is None else partial(self._store.fetch, prompt.tokens, prompt.salt, queue)
        if self._grammars is None:
            begin()
        else:
            self._grammars.when_compiled(request["grammar"], begin)

    def _queue(self, connection: PrefillConnection, number: int, prompt: PrefillRequest) -> None:
        """Submit a prompt to the engine, unless it was cancelled. It may be called outside of `serve`, so it handles errors itself."""
        if number not in connection.fetching or connection not in self.connections:
            return
        connection.fetching.remove(number)
        try:
            self._submit(connection, number, prompt)
        except _PEER_ERRORS:
            self._close(connection)

    def _submit(self, connection: PrefillConnection, number: int, prompt: PrefillRequest) -> None:
        digests = self._blocks.digests(prompt.tokens, prompt.salt, tail=True)
        try:
            requests = self._engine.submit_samples(prompt.tokens, prompt.count, **prompt.options)
        except Exception as error:
            # It concerns this prompt only. The receiver submits the prompt itself, meets the error, and reports it.
            connection.frames.send({"failed": number, "error": str(error)})
            return
        unsent = self._blocks.unsent(digests, prompt.first_block)
        connection.jobs[number] = job = PrefillJob(number, len(prompt.tokens), unsent, requests)
        self._job_of_text.update(dict.fromkeys(requests, job))
        if self._store is not None:
            self._store.publish(requests[0], prompt.tokens, prompt.salt)

    def _free_slots(self, connection: PrefillConnection, slots: Sequence[int]) -> None:
        assert connection.staging is not None
        start, count = slots
        connection.staging.give_back(start, count)

    def _use_mapping(self, connection: PrefillConnection, mapped: bool) -> None:
        """Note whether the receiver has mapped this engine's cache. If so, it copies the blocks itself from now on."""
        if connection.mapped_sender is None:
            raise BadFrame("the cache was not offered")
        connection.mapped_sender.mapped = mapped is True

    def _take_back(self, connection: PrefillConnection, number: int) -> None:
        if connection.mapped_sender is None:
            raise BadFrame("no block is to be returned")
        connection.mapped_sender.release(number)

    def _cancel(self, connection: PrefillConnection, number: int) -> None:
        connection.fetching.discard(number)
        if (job := connection.jobs.get(number)) is not None:
            self._end(connection, job)

    def after_step(self, updates: Sequence[Update]) -> list[Update]:
        """Process the updates of a step: keep the first tokens, and send the blocks that were computed.

        Returns the updates of requests that are not prompts of receivers.
        """
        others = []
        for update in updates:
            if update.number not in self._job_of_text:
                others.append(update)
            elif update.reason is not None and (job := self._job_of_text.pop(update.number)) is not None:
                job.firsts[update.number] = [update.tokens, update.details]
                job.failed |= update.reason == "failed"
        for connection in list(self.connections):
            if connection.jobs:
                try:
                    self._send_blocks(connection)
                except EOFError:
                    self._close(connection)
        self.report_load()
        return others

    def _send_blocks(self, connection: PrefillConnection) -> None:
        """Send the computed blocks of all prompts, as far as there is room in the staging memory.

        After the last block of a prompt, its first tokens are sent.
        """
        for job in list(connection.jobs.values()):
            if job.failed:  # Its blocks may be wrong, so they are not sent.
                self._end(connection, job)
                connection.frames.send({"failed": job.number, "error": "a text of the prompt failed"})
                continue
            job.unsent.extend()
            while job.unsent and self._send_run(connection, job):
                pass
            if job.computed and not job.unsent:
                firsts = [job.firsts[number] for number in job.requests]
                self._end(connection, job)
                connection.frames.send({"first": job.number, "texts": firsts})

    def _send_run(self, connection: PrefillConnection, job: PrefillJob) -> bool:
        """Send some blocks of a prompt; all of them if the receiver maps the cache. Returns false if the staging memory is full."""
        staging = connection.staging
        size = self._blocks.block_bytes
        assert staging is not None
        if not connection.unacknowledged_blocks:
            connection.silent_since = time.monotonic()  # From now on the receiver has blocks to acknowledge.
        if (sender := connection.mapped_sender) is not None and sender.mapped:
            count = len(job.unsent)
            connection.frames.send({"mapped_blocks": job.number, **sender.send(job.unsent)})
            self.sent_blocks += count
            return True
        start, count = staging.take(min(len(job.unsent), max(1, RUN_BYTES // size)))
        if not count:
            return False
        content = staging.content(start, count)
        index = job.unsent.next
        self._blocks.read(job.unsent.take(count), content)
        job.unsent.copied(count)
        checksums = [xxhash.xxh3_64_hexdigest(content[at : at + size]) for at in range(0, count * size, size)]
        connection.frames.send(
            {"blocks": job.number, "index": index, "slots": [start, count], "checksums": checksums},
            None if connection.frames.local else content,
        )
        self.sent_blocks += count
        return True

    def report_load(self) -> None:
        """Send each receiver the number of tokens that this engine has still to compute for other receivers.

        The report also shows that this engine is alive.
        """
        total = sum(connection.prompt_tokens for connection in self.connections)
        for connection in list(self.connections):
            connection.load_due = connection.frames.sending  # If the receiver does not read, reports must not pile up.
            if connection.staging is not None and not connection.load_due:
                try:
                    others = total - connection.prompt_tokens
                    connection.frames.send({"load": others, "accepting": self.accepting})
                except EOFError:
                    self._close(connection)

    def end_late(self, now: float) -> None:
        """Close connections that have not proved the key in time, and connections that have not acknowledged blocks in time."""
        for connection in self._table.late():
            self._close(connection)
        for connection in list(self.connections):
            if connection.unacknowledged_blocks and now > connection.silent_since + self._lease:
                self._close(connection)

    def _end(self, connection: PrefillConnection, job: PrefillJob) -> None:
        """Remove a prompt and abort its unfinished sequences. Its computed blocks stay in the prefix cache."""
        del connection.jobs[job.number]
        for number in job.requests:
            if number in self._job_of_text:
                self._job_of_text[number] = None
                self._engine.abort(number)
        job.unsent.release()

    def _close(self, connection: PrefillConnection) -> None:
        if connection not in self.connections:
            return
        self.connections.remove(connection)
        self._table.remove(connection)
        for job in list(connection.jobs.values()):
            self._end(connection, job)
        if connection.staging is not None:
            connection.staging.close()
        if connection.mapped_sender is not None:
            connection.mapped_sender.close()
        connection.frames.close()

    def close(self) -> None:
        """Close all connections and the listening socket."""
        for connection in list(self.connections):
            self._close(connection)
        self._acceptor.close()
        self.listening.close()
