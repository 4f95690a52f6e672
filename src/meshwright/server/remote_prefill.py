"""Remote prefill, on the side of the engine that receives cache blocks. Other engines (peers) compute prompts; this engine decodes them.

For each prompt, `RemotePrefill` does these steps:

1. reserve blocks of this engine's cache;
2. send the prompt to the peer that has the fewest tokens left to compute;
3. copy the blocks that the peer sends into the reserved blocks;
4. receive the first token of each sequence from the peer, release the reservation, and submit the sequences to this engine.

After an error in one of these steps, the sequences are submitted to this engine immediately. The engine finds the blocks that were received
in its prefix cache, and computes the rest of the prompt.

`server.prefill_jobs` is the side of the peer.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from meshwright.server.frames import MESSAGE_BYTES, BadFrame, Frame, FrameSocket, is_list_of_ids, start_connecting
from meshwright.server.mapped_transfer import MappedReceiver
from meshwright.server.messages import DETAILS
from meshwright.server.staging import map_staging

if TYPE_CHECKING:
    from meshwright.policies.moving_blocks import ReservedBlocks
    from meshwright.serve.prefix_blocks import PrefixBlocks

RETRY_SECONDS = 0.5
"""Time between two attempts to connect to a peer."""
SHARED_KEYS = ("tokens", "sampling", "stop_ids", "grammar", "priority", "salt")
"""Keys of the message `submit` that are copied into the message `prefill` to a peer."""


class Submit(Protocol):
    """A function that submits the sequences of a request to this engine.

    `request` is a message `submit`. `firsts` has, for each sequence, the tokens that a peer has computed, and a dictionary of `details` as
    in a message `step`. It is None if no peer has computed the first tokens.
    """

    def __call__(self, request: Mapping[str, Any], firsts: Sequence[Sequence[Any]] | None) -> None: ...


@dataclass(eq=False)
class RemotePrompt:
    """A prompt that is not submitted to this engine yet."""

    request: Mapping[str, Any]
    """The message `submit` from the HTTP process."""
    number: int
    """Number of the prompt, which identifies it in messages to its peer."""
    digests: Sequence[bytes]
    """Digests of the prompt's blocks. The last block may not be full."""
    turn: float
    """Order among the waiting prompts, from arrival and priority. The smallest goes first."""
    peer: Peer | None = None
    """The peer that computes the prompt; None while the prompt waits for cache blocks."""
    reserved: ReservedBlocks | None = None
    """The reserved blocks of this engine's cache; None while the prompt waits for them."""
    heard: float = 0.0
    """Time of the last message from the peer."""
    intact: bool = True
    """Whether all blocks so far had the right checksums.

    Blocks after a damaged block are not written: the prefix cache can use a block only together with all blocks before it.
    """
    aborted: set[int] = field(default_factory=set)
    """Ids of the sequences that were aborted."""


class Peer:
    """Another engine that computes prompts for this one."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.frames: FrameSocket | None = None
        """The connection to the peer; None if it is not connected."""
        self.memory: memoryview | None = None
        """The peer's staging memory, if the peer is on this host; else None."""
        self.mapped_receiver: MappedReceiver | None = None
        """The peer's cache, if this process has mapped it; else None."""
        self.slots = 0
        """Number of blocks in the peer's staging memory."""
        self.usable = False
        """Whether the peer accepts prompts."""
        self.load = 0
        """Number of tokens that the peer has still to compute for other engines."""
        self.prompts: dict[int, RemotePrompt] = {}
        """Prompts that were sent to the peer and are not finished, by number."""
        self.retry = 0.0
        """Time from which on this engine may try to connect again."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the peer has still to compute, for this engine (all tokens of its prompts) and for others."""
        return self.load + sum(len(prompt.request["tokens"]) for prompt in self.prompts.values())


class RemotePrefill:
    """Lets peers compute the prompts of one engine.

    `submit` is called when the sequences of a prompt are to be submitted to this engine. `lease_seconds` is the longest time in which a
    peer may send nothing about a prompt.
    """

    def __init__(
        self, blocks: PrefixBlocks, addresses: Sequence[str], key: str, lease_seconds: float, submit: Submit
    ) -> None:
        self._blocks = blocks
        self._key = key
        self._lease = lease_seconds
        self._submit = submit
        self.peers = [Peer(address) for address in addresses]
        self.enabled = False
        """Whether prompts are sent to peers."""
        self._identity = ""
        """Identity of this engine's weights and blocks (`PrefixBlocks.identity`)."""
        self._waiting: deque[RemotePrompt] = deque()
        """Prompts that wait for cache blocks, in the order of `RemotePrompt.turn`."""
        self._numbers = itertools.count()
        self.received_blocks = self.damaged_blocks = self.lost_prompts = 0
        """Numbers of received blocks, of blocks with a wrong checksum, and of prompts that a peer did not finish."""

    @property
    def prompts(self) -> list[RemotePrompt]:
        """All prompts that are not submitted to this engine yet."""
        return [*(prompt for peer in self.peers for prompt in peer.prompts.values()), *self._waiting]

    @property
    def _reserved(self) -> int:
        return sum(len(peer.prompts) for peer in self.peers)

    def use_identity(self, identity: str) -> None:
        """Set a new identity, after the weights have changed. All connections are closed; this engine computes the present prompts."""
        for peer in self.peers:
            self.lose(peer, retry=0.0)
        # No peer is usable until it is connected with the new identity, so waiting prompts are submitted here.
        self.start()
        self._identity = identity

    def begin(self, request: Mapping[str, Any]) -> bool:
        """Take over a request if a peer can compute its prompt, and return true. If it returns false, the caller submits the request.

        It returns false if no peer is usable, if all full blocks of the prompt are cached, or if the cache is too small for the prompt.
        """
        if not self.enabled or not any(peer.usable for peer in self.peers):
            return False
        tokens = request["tokens"]
        salt = request["salt"]
        if not self._blocks.missing(self._blocks.digests(tokens, salt)):
            return False
        digests = self._blocks.digests(tokens, salt, tail=True)
        if not self._blocks.can_hold(digests):
            return False
        turn = self._blocks.limits.turn(time.monotonic(), request["priority"])
        prompt = RemotePrompt(request, next(self._numbers), digests, turn)
        insort(self._waiting, prompt, key=lambda waiting: waiting.turn)
        self.start()
        return True

    def start(self) -> None:
        """Send waiting prompts to peers, in order, as far as the cache has room for them."""
        while self._waiting:
            prompt = self._waiting[0]
            usable = [peer for peer in self.peers if peer.usable]
            if not usable or not self.enabled:
                self._submit_here(self._waiting.popleft())
                continue
            reserved = self._blocks.reserve(prompt.digests, self._reserved, len(prompt.request["tokens"]))
            if reserved is None:
                return
            self._waiting.popleft()
            prompt.reserved = reserved
            if not len(reserved):  # All blocks of the prompt have been cached while it waited.
                self._submit_here(prompt)
                continue
            self._ask(prompt, min(usable, key=lambda peer: peer.tokens))

    def _ask(self, prompt: RemotePrompt, peer: Peer) -> None:
        assert peer.frames is not None and prompt.reserved is not None
        request = prompt.request
        prompt.peer = peer
        prompt.heard = time.monotonic()
        peer.prompts[prompt.number] = prompt
        shared = {key: request[key] for key in SHARED_KEYS}
        message = {"job": prompt.number, "count": len(request["ids"]), "first_block": prompt.reserved.first, **shared}
        try:
            peer.frames.send({"prefill": message})
        except EOFError:
            self.lose(peer)

    def abort(self, ids: Sequence[int]) -> None:
        """Abort the sequences `ids`. If all sequences of a prompt are aborted, the prompt is cancelled at its peer."""
        for prompt in self.prompts:
            prompt.aborted.update(set(ids) & set(prompt.request["ids"]))
            if len(prompt.aborted) < len(prompt.request["ids"]):
                continue
            if prompt in self._waiting:
                self._waiting.remove(prompt)
            elif (peer := self._forget(prompt)) is not None and peer.frames is not None:
                try:
                    peer.frames.send({"cancel": prompt.number})
                except EOFError:
                    self.lose(peer)

    def connect(self, now: float) -> None:
        """Start to connect to all peers that are not connected, if `enabled` is set and the time of their next attempt has come."""
        for peer in self.peers:
            if not self.enabled or peer.frames is not None or now < peer.retry:
                continue
            peer.retry = now + RETRY_SECONDS
            if (end := start_connecting(peer.address)) is None:
                continue
            peer.frames = FrameSocket(end)
            try:
                peer.frames.introduce(self._key)
            except EOFError:
                self.lose(peer)

    def end_late(self, now: float) -> None:
        """Close connections to peers that have sent nothing about a prompt for too long."""
        for peer in self.peers:
            if any(now > prompt.heard + self._lease for prompt in peer.prompts.values()):
                self.lose(peer)

    def serve(self, peer: Peer, *, readable: bool) -> None:
        """Send the remaining bytes to a peer and, if its socket is `readable`, process its messages.

        A wrong message ends the connection.
        """
        if peer.frames is None:
            return
        try:
            peer.frames.flush()
            for frame in [] if not readable else peer.frames.receive():
                self._take(peer, frame)
        except (EOFError, BadFrame, AttributeError, KeyError, OverflowError, TypeError, ValueError):
            self.lose(peer)

    def _take(self, peer: Peer, frame: Frame) -> None:
        message = frame.message
        now = time.monotonic()
        assert peer.frames is not None
        if peer.frames.proves(message):
            own = self._blocks.own_blocks
            peer.frames.say_hello({"identity": self._identity, "host": "" if own is None else own.host})
            return
        for prompt in peer.prompts.values():
            prompt.heard = now
        if "blocks" in message:
            self._copy(peer, message, frame.payload)
        elif "mapped_blocks" in message:
            self._copy_lent(peer, message)
        elif "load" in message:
            peer.load = int(message["load"])
            peer.usable = bool(message["accepting"])
        elif "first" in message:
            if (prompt := peer.prompts.get(message["first"])) is not None:
                self._finish(prompt, message["texts"])
        elif "failed" in message:
            if (prompt := peer.prompts.get(message["failed"])) is not None:
                self.lost_prompts += 1
                self._submit_here(prompt)
        elif "welcome" in message:
            self._begin_connection(peer, message["welcome"])
            if (offer := message.get("cache")) is not None:
                self._map(peer, offer)
        else:
            raise BadFrame("the peer refuses, or says something unknown")

    def _begin_connection(self, peer: Peer, sizes: Mapping[str, int]) -> None:
        frames = peer.frames
        assert frames is not None
        if sizes["block_bytes"] != self._blocks.block_bytes:
            raise BadFrame("blocks of another size")
        frames.limit = MESSAGE_BYTES
        peer.slots = sizes["slots"]
        if frames.local:
            descriptor = frames.take_descriptor()
            if descriptor is None:
                raise BadFrame("staging memory is missing")
            try:
                peer.memory = map_staging(descriptor, sizes["slots"] * sizes["block_bytes"])
            except OSError:  # There is not enough memory. The connection ends.
                raise EOFError from None

    def _map(self, peer: Peer, offer: Sequence[Mapping[str, Any]]) -> None:
        """Try to map the cache of a peer, and send the peer whether it is mapped."""
        if peer.frames is None or peer.mapped_receiver is not None:
            raise BadFrame("the cache is offered again")
        peer.mapped_receiver = MappedReceiver.of_offer(self._blocks.own_blocks, offer)
        peer.frames.send({"mapped": peer.mapped_receiver is not None})

    def _copy(self, peer: Peer, message: Mapping[str, Any], payload: bytearray) -> None:
        """Copy the blocks of a message into the cache, up to the first block with a wrong checksum. Then acknowledge the message.

        The content of the blocks is in the peer's staging memory if the peer is on this host, and else in `payload`.
        """
        assert peer.frames is not None
        size = self._blocks.block_bytes
        start, count = message["slots"]
        content = memoryview(payload)
        if peer.memory is not None:
            content = peer.memory[start * size : (start + count) * size]
        checksums = message["checksums"]
        if content.nbytes != count * size or len(checksums) != count or start < 0 or count < 1:
            raise BadFrame("blocks without their content")
        if (prompt := peer.prompts.get(message["blocks"])) is not None and prompt.intact:
            intact = 0
            for checksum in checksums:
                if xxhash.xxh3_64_hexdigest(content[intact * size : (intact + 1) * size]) != checksum:
                    break
                intact += 1
            if intact < count:
                self.damaged_blocks += 1
                prompt.intact = False
            if intact:
                self._write(prompt, message["index"], content[: intact * size], intact)
        peer.frames.send({"copied": [start, count]})

    def _copy_lent(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Copy blocks from the peer's mapped cache into this engine's cache. Then send the peer that it may free its blocks."""
        if peer.frames is None or peer.mapped_receiver is None:
            raise BadFrame("the cache is not mapped")
        if (prompt := peer.prompts.get(message["mapped_blocks"])) is not None and prompt.intact:
            assert prompt.reserved is not None
            entered = peer.mapped_receiver.copy(message, prompt.reserved)
            self.received_blocks += entered
            if entered < len(message["tables"]):
                self.damaged_blocks += 1
                prompt.intact = False
        peer.frames.send({"returned": message["number"]})

    def _write(self, prompt: RemotePrompt, index: int, content: memoryview, count: int) -> None:
        """Write the content of `count` blocks into the reserved blocks, from block number `index` of the prompt on."""
        assert prompt.reserved is not None
        tables = prompt.reserved.tables(index, count)
        if tables is None:
            raise BadFrame(f"blocks {index} to {index + count} are not asked for")
        self._blocks.write(tables, content)
        prompt.reserved.enter(index, count)
        self.received_blocks += count

    def _finish(self, prompt: RemotePrompt, firsts: Sequence[Sequence[Any]]) -> None:
        """Submit the sequences of a prompt to this engine, to go on after the first tokens that the peer has computed.

        `firsts` has the tokens and the details of each sequence. If a sequence failed at the peer, this engine computes the prompt instead.
        """
        if len(firsts) != len(prompt.request["ids"]):
            raise BadFrame("not all sequences have a first token")
        for tokens, details in firsts:
            types_fit = all(isinstance(value, DETAILS[key]) for key, value in details.items())
            if not is_list_of_ids(tokens) or not types_fit:
                raise BadFrame("a first token of a wrong type")
        if any(details.get("reason") not in ("length", "stop") for _, details in firsts):
            self.lost_prompts += 1
            self._submit_here(prompt)
            return
        self._forget(prompt)
        self._submit_wanted(prompt, firsts)

    def _submit_here(self, prompt: RemotePrompt) -> None:
        """Submit the sequences of a prompt without first tokens: this engine computes the missing blocks and the first tokens itself."""
        self._forget(prompt)
        self._submit_wanted(prompt, None)

    def _submit_wanted(self, prompt: RemotePrompt, firsts: Sequence[Sequence[Any]] | None) -> None:
        ids = prompt.request["ids"]
        if firsts is None and prompt.aborted:
            # The seed of a sample depends on its index among the samples, so aborted samples are submitted too and end immediately.
            firsts = [[(), {}] for _ in ids]
        if firsts is not None:
            firsts = [
                [(), {"reason": "abort"}] if id in prompt.aborted else first
                for id, first in zip(ids, firsts, strict=True)
            ]
        self._submit(prompt.request, firsts)

    def _forget(self, prompt: RemotePrompt) -> Peer | None:
        """Release the reserved blocks of a prompt, and remove it from its peer. Returns the peer, or None if it had none."""
        peer = prompt.peer
        if peer is not None:
            del peer.prompts[prompt.number]
            prompt.peer = None
        if prompt.reserved is not None:
            prompt.reserved.release()
            prompt.reserved = None
        return peer

    def lose(self, peer: Peer, retry: float | None = None) -> None:
        """Close the connection to a peer, and submit its prompts to this engine.

        `retry` is the time of the next attempt to connect; by default in `RETRY_SECONDS`.
        """
        if peer.frames is not None:
            peer.frames.close()
        if peer.mapped_receiver is not None:
            peer.mapped_receiver.close()
        peer.frames = None
        peer.memory = None
        peer.mapped_receiver = None
        peer.usable = False
        peer.load = 0
        peer.retry = time.monotonic() + RETRY_SECONDS if retry is None else retry
        for prompt in list(peer.prompts.values()):
            self.lost_prompts += 1
            self._submit_here(prompt)

    def close(self) -> None:
        """Close all connections and forget all prompts, without submitting them."""
        for prompt in self.prompts:
            if prompt.peer is not None:
                self._forget(prompt)
        self._waiting.clear()
        for peer in self.peers:
            self.lose(peer)
