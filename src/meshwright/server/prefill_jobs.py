"""The sender of blocks: computes prompts for other engines, with the first token of each sequence, and sends their cache blocks.

A prompt is a request of the engine with one new token. After each step the new blocks of prompts are held in the cache. If the receiver
maps this engine's cache, it gets the numbers of the blocks. Else they are copied into staging memory, as far as there is room, and sent.
The receiver acknowledges the blocks that it has copied. If a connection ends, or acknowledges nothing for too long, its prompts are aborted
and their blocks freed.
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
"""Most bytes of blocks in one message."""
MOST_SEQUENCES = 4096
"""Most sequences of one prompt."""
_PEER_ERRORS = (EOFError, BadFrame, AttributeError, KeyError, OverflowError, TypeError, ValueError)
"""Exceptions caused by a peer that leaves or sends a wrong message."""


@dataclass(frozen=True)
class PrefillRequest:
    """The fields of a message `prefill`, checked."""

    tokens: list[int]
    salt: str
    count: int
    first_block: int
    """Index of the first block that the receiver lacks."""
    options: Mapping[str, Any]
    """Options of `Engine.submit_samples`."""

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> PrefillRequest:
        """The checked fields. Raises BadInput for a value out of range; BadFrame, KeyError, TypeError or ValueError for a wrong message."""
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
    """Computation of a prompt, and of the first token of each of its sequences."""

    def __init__(self, number: int, prompt_tokens: int, unsent: UnsentBlocks, requests: Sequence[int]) -> None:
        self.number = number
        """Number that the receiver gave the prompt."""
        self.prompt_tokens = prompt_tokens
        self.unsent = unsent
        self.requests = list(requests)
        """The engine's numbers."""
        self.firsts: dict[int, list[Any]] = {}
        """By the engine's number: the first tokens of a sequence, and the details of a message `step`."""
        self.failed = False
        """Whether a sequence has failed here. The receiver then computes the prompt itself."""

    @property
    def computed(self) -> bool:
        """Whether all sequences have their first token."""
        return len(self.firsts) == len(self.requests)


class PrefillConnection:
    """The connection to a receiver: its prompts, and the blocks that are sent and not acknowledged."""

    def __init__(self, end: socket.socket, now: float) -> None:
        self.frames = FrameSocket(end)
        self.silent_since = now
        """Time from which the receiver's silence counts."""
        self.staging: Staging | None = None
        """Staging memory for its blocks. None until it has shown the key."""
        self.mapped_sender: MappedSender | None = None
        """Blocks that the receiver copies out of this engine's cache. None if it cannot map the cache."""
        self.jobs: dict[int, PrefillJob] = {}
        """Jobs by the receiver's number, in the order of their arrival."""
        self.fetching: set[int] = set()
        """Numbers of the prompts whose blocks are being looked up in the store."""
        self.load_due = False
        """Whether a report of the load is due, once earlier messages are sent."""

    @property
    def unacknowledged_blocks(self) -> int:
        """Blocks that the receiver has not copied yet."""
        return (0 if self.staging is None else self.staging.used) + (
            0 if self.mapped_sender is None else self.mapped_sender.unreturned_blocks
        )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the receiver's prompts that are not computed yet."""
        return sum(job.prompt_tokens for job in self.jobs.values() if not job.computed)


class PrefillJobs:
    """Computes prompts on an engine for the engines that connect to a listening socket."""

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
        """`grammars` compiles the grammars of prompts in a thread, while the engine computes steps."""
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
        """Whether new prompts are taken."""
        self.connections: list[PrefillConnection] = []
        self._job_of_text: dict[int, PrefillJob | None] = {}
        """The prompts of unfinished sequences by the engine's number; None for aborted ones."""
        self._identity = ""
        self.sent_blocks = 0

    @property
    def unacknowledged_blocks(self) -> int:
        """Blocks that receivers have not copied yet."""
        return sum(connection.unacknowledged_blocks for connection in self.connections)

    def use_identity(self, identity: str) -> None:
        """From now on serve peers that have these weights. All present connections end."""
        for connection in list(self.connections):
            self._close(connection)
        self._identity = identity

    def accept(self, *, readable: bool) -> None:
        """Take new connections, if the listening socket has any."""
        for end in self._acceptor.accept() if readable else ():
            connection = PrefillConnection(end, time.monotonic())
            closed = self._table.add(connection, TRANSFERS.head_seconds)
            if closed is connection:
                end.close()
                continue
            if closed is not None:
                self._close(closed)
            self.connections.append(connection)

    def serve(self, connection: PrefillConnection, *, readable: bool) -> None:
        """Send the remaining bytes to a receiver and process its messages; a wrong message ends the connection."""
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
        """Accept the connection of a peer that has shown the key, if it has the same weights."""
        self._table.keep(connection)
        if hello["identity"] != self._identity:
            connection.frames.send({"refused": "other weights, formats or sizes of blocks"})
            raise EOFError
        try:
            staging = Staging(self._blocks.block_bytes)
        except OSError:  # files or memory are exhausted
            raise EOFError from None
        connection.staging = staging
        connection.frames.limit = MESSAGE_BYTES
        connection.mapped_sender = sender = MappedSender.for_peer(self._blocks.own_blocks, hello.get("host"))
        sizes = {"block_bytes": staging.block_bytes, "slots": staging.slots}
        welcome = {"welcome": sizes} if sender is None else {"welcome": sizes, "cache": sender.offer}
        connection.frames.send(welcome, descriptor=staging.descriptor if connection.frames.local else None)
        self.report_load()

    def _begin(self, connection: PrefillConnection, request: Mapping[str, Any]) -> None:
        """Take a prompt, and look up its beginning in the store if there is one."""
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
        """Submit a prompt unless it was cancelled. The store calls this outside of `serve`, so errors are handled here."""
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
        except Exception as error:  # of this prompt alone; its engine meets the same error and reports it
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
        """Note whether the receiver has mapped the cache and copies blocks itself from now on."""
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
        """Note first tokens in a step's updates, and send the computed blocks; returns the updates of other requests."""
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
        """Send the computed blocks of all prompts as far as there is room, and the first tokens behind the last of them."""
        for job in list(connection.jobs.values()):
            if job.failed:  # its blocks may be wrong
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
        """Send some blocks of a prompt, or all to a receiver that maps them; returns whether there was room for any."""
        staging = connection.staging
        size = self._blocks.block_bytes
        assert staging is not None
        if not connection.unacknowledged_blocks:
            connection.silent_since = time.monotonic()  # from now on the receiver has something to acknowledge
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
        """Send receivers the number of tokens of other prompts before theirs; this also shows that the engine is alive."""
        total = sum(connection.prompt_tokens for connection in self.connections)
        for connection in list(self.connections):
            connection.load_due = connection.frames.sending  # reports to a receiver that is stuck would pile up
            if connection.staging is not None and not connection.load_due:
                try:
                    others = total - connection.prompt_tokens
                    connection.frames.send({"load": others, "accepting": self.accepting})
                except EOFError:
                    self._close(connection)

    def end_late(self, now: float) -> None:
        """Close connections without a key, and those that do not acknowledge blocks, after their time."""
        for connection in self._table.late():
            self._close(connection)
        for connection in list(self.connections):
            if connection.unacknowledged_blocks and now > connection.silent_since + self._lease:
                self._close(connection)

    def _end(self, connection: PrefillConnection, job: PrefillJob) -> None:
        """Remove a prompt: its computed blocks stay in the prefix cache, the remainder is aborted."""
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
