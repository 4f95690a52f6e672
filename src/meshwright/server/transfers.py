"""The role of an engine's process, and its connections to the engines of other roles."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.server.frames import FrameSocket, listen
from meshwright.server.grammar_jobs import GrammarJobs
from meshwright.server.prefill_jobs import PrefillJobs
from meshwright.server.remote_prefill import RemotePrefill, Submit
from meshwright.server.store_client import StoreClient
from meshwright.spec.deployment import Role

if TYPE_CHECKING:
    from meshwright.serve.engine import Engine
    from meshwright.serve.generation import Update

TICK_SECONDS = 0.25
"""Longest time between two looks at leases and lost peers."""


@dataclass(frozen=True, kw_only=True)
class TransferSetup:
    """The role of an engine and its peers."""

    role: Role = "both"
    address: str | None = None
    """Address at which other engines ask for prompts. None if they cannot."""
    peers: tuple[str, ...] = ()
    """Addresses of the engines that compute prompts."""
    store: str | None = None
    """Address of a store of blocks; None: there is none."""
    key: str = ""
    """Key that peers must show."""
    seconds: float = 30.0
    """Longest time without news from the other side."""


class TransferFigures(NamedTuple):
    """Counts of blocks and prompts exchanged with other engines."""

    sent_blocks: int = 0
    received_blocks: int = 0
    damaged_blocks: int = 0
    """Blocks with a wrong checksum, which were computed again."""
    lost_prompts: int = 0
    """Prompts that a peer did not finish."""
    waiting_prompts: int = 0
    """Prompts that are at a peer, or wait for room in the cache."""
    usable_peers: int = 0
    """Peers that take prompts of this engine now."""
    stored_blocks: int = 0
    """Blocks published to the store."""
    fetched_blocks: int = 0
    """Blocks that came from the store."""
    unacknowledged_blocks: int = 0
    """Blocks that were sent and that the other side has not copied yet."""
    store_connected: bool = False
    """Whether the store answers."""


class BlockTransfers:
    """The blocks that one engine exchanges with others, by its role. Not for several threads at once."""

    def __init__(
        self, engine: Engine, setup: TransferSetup, submit: Submit, grammars: GrammarJobs | None = None
    ) -> None:
        """`submit` queues the sequences of a request on the engine; `grammars` compiles those of others' prompts.

        Raises BadInput if `setup.address` cannot be used."""
        self._blocks = blocks = engine.prefix_blocks()
        self._store = None if setup.store is None else StoreClient(blocks, setup.store, setup.key)
        self._submit = submit
        self._fetching = set[int]()
        """Ids of requests whose prompts are looked up in the store."""
        self._unwanted = set[int]()
        """Those of them that were aborted."""
        self._sender = None
        if setup.address is not None:
            listening = listen(setup.address)
            self._sender = PrefillJobs(engine, blocks, listening, setup.key, setup.seconds, self._store, grammars)
        peers = [address for address in setup.peers if address != setup.address]
        self._receiver = RemotePrefill(blocks, peers, setup.key, setup.seconds, submit)
        self._selector = selectors.DefaultSelector()
        self._watched: dict[int, tuple[FrameSocket, int]] = {}
        """Connections in the selector by descriptor, with their events."""
        self._next_tick = 0.0
        if self._sender is not None:
            self._selector.register(self._sender.listening, selectors.EVENT_READ, self._sender.accept)
        self.use_new_weights()
        self.use_role(setup.role)

    def use_role(self, role: Role) -> None:
        """Take new work by this role; running work continues."""
        if self._sender is not None:
            self._sender.accepting = role != "decode"
            self._sender.report_load()
        self._receiver.enabled = role == "decode"
        self._receiver.connect(time.monotonic())

    def use_new_weights(self) -> None:
        """End all connections, because their blocks are of the old weights. Prompts at peers are computed here."""
        identity = self._blocks.identity()
        if self._sender is not None:
            self._sender.use_identity(identity)
        self._receiver.use_identity(identity)
        if self._store is not None:
            self._store.use_identity(identity)

    @property
    def figures(self) -> TransferFigures:
        """Counts of blocks and prompts exchanged so far."""
        receiver = self._receiver
        store = self._store
        sent = 0 if self._sender is None else self._sender.sent_blocks
        return TransferFigures(
            sent,
            receiver.received_blocks,
            receiver.damaged_blocks + (0 if store is None else store.damaged_blocks),
            receiver.lost_prompts,
            len(receiver.prompts),
            sum(peer.usable for peer in receiver.peers),
            0 if store is None else store.stored_blocks,
            0 if store is None else store.fetched_blocks,
            (0 if store is None else store.unacknowledged_blocks)
            + (0 if self._sender is None else self._sender.unacknowledged_blocks),
            store is not None and store.usable,
        )

    def begin(self, request: Mapping[str, Any]) -> bool:
        """Let another engine compute the prompt of a request, or look it up in the store. False if the caller should submit it here."""
        if self._store is None:
            return self._receiver.begin(request)
        self._fetching.update(request["ids"])
        self._store.fetch(request["tokens"], request["salt"], partial(self._begin_fetched, request))
        return True

    def _begin_fetched(self, request: Mapping[str, Any]) -> None:
        """Continue a request after the look-up of its prompt."""
        ids = set(request["ids"])
        wanted = not ids <= self._unwanted
        self._fetching -= ids
        self._unwanted -= ids
        if wanted and not self._receiver.begin(request):
            self._submit(request, None)

    def publish(self, number: int, request: Mapping[str, Any]) -> None:
        """Hand the blocks that the engine computes for the prompt of its request `number` to the store."""
        if self._store is not None:
            self._store.publish(number, request["tokens"], request["salt"])

    def abort(self, ids: Sequence[int]) -> None:
        """Forget sequences whose prompts are elsewhere."""
        self._unwanted.update(self._fetching.intersection(ids))
        self._receiver.abort(ids)

    def after_step(self, updates: Sequence[Update]) -> Sequence[Update]:
        """Send the blocks that a step has computed for other engines; returns the updates of other requests."""
        if self._store is not None:
            self._store.after_step(updates)
        if self._sender is not None:
            updates = self._sender.after_step(updates)
        return updates

    def wait(self, own: Sequence[int], busy: Callable[[], bool]) -> None:
        """Process the messages of peers; unless the engine is `busy`, wait for one, or for data at a descriptor of `own`."""
        self._receiver.start()
        self._watch()
        for descriptor in own:
            if descriptor not in self._selector.get_map():
                self._selector.register(descriptor, selectors.EVENT_READ, None)
        for key, events in self._selector.select(0 if busy() else TICK_SECONDS):
            if key.data is not None:
                key.data(readable=bool(events & selectors.EVENT_READ))
        if (now := time.monotonic()) >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick(now)

    def _tick(self, now: float) -> None:
        """Close connections that are late, once arrived messages were read, and connect to peers without a connection."""
        self._receiver.end_late(now)
        self._receiver.connect(now)
        if self._store is not None:
            self._store.tick(now)
        if self._sender is not None:
            self._sender.end_late(now)

    def _watch(self) -> None:
        """Keep the selector up to date with the connections."""
        current = {frames.fileno(): (frames, serve) for frames, serve in self._connections()}
        for descriptor, (frames, _) in list(self._watched.items()):
            if descriptor not in current or current[descriptor][0] is not frames:
                self._selector.unregister(descriptor)
                del self._watched[descriptor]
        for descriptor, (frames, serve) in current.items():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if frames.sending else 0)
            if descriptor not in self._watched:
                self._selector.register(descriptor, events, serve)
            elif self._watched[descriptor][1] != events:
                self._selector.modify(descriptor, events, serve)
            self._watched[descriptor] = frames, events

    def _connections(self) -> list[tuple[FrameSocket, Callable[..., None]]]:
        """Return all connections with the functions that serve them."""
        found: list[tuple[FrameSocket, Callable[..., None]]] = []
        if self._sender is not None:
            found += [(receiver.frames, partial(self._sender.serve, receiver)) for receiver in self._sender.connections]
        if self._store is not None and self._store.frames is not None:
            found.append((self._store.frames, self._store.serve))
        peers = [(peer.frames, partial(self._receiver.serve, peer)) for peer in self._receiver.peers]
        return found + [(frames, serve) for frames, serve in peers if frames is not None]

    def close(self) -> None:
        """Close all connections and the listening socket."""
        if self._store is not None:
            self._store.close()
        self._receiver.close()
        if self._sender is not None:
            self._sender.close()
        self._selector.close()
