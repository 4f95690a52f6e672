"""The exchange of cache blocks between engines: `BlockTransfers` has all connections of one engine to other engines and to the store.

The role of an engine decides which prompts it computes: "prefill" and "both" compute prompts for other engines, "decode" sends its own
prompts to other engines.
"""

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
"""Time between two checks for late connections and for peers to connect to, in seconds."""


@dataclass(frozen=True, kw_only=True)
class TransferSetup:
    """Settings for the exchange of blocks."""

    role: Role = "both"
    """The engine's role at its start."""
    address: str | None = None
    """Address at which this engine accepts prompts of other engines. None if it accepts none."""
    peers: tuple[str, ...] = ()
    """Addresses of the engines that compute prompts for this engine."""
    store: str | None = None
    """Address of a store of blocks (`server.block_store`). None if there is no store."""
    key: str = ""
    """Key that both sides of a connection must know."""
    seconds: float = 30.0
    """If the other side of a connection sends nothing for this time while it should, the connection is closed."""


class TransferFigures(NamedTuple):
    """Numbers of blocks and prompts that were exchanged with other engines and the store."""

    sent_blocks: int = 0
    """Blocks that were sent to other engines."""
    received_blocks: int = 0
    """Blocks that were received from other engines."""
    damaged_blocks: int = 0
    """Number of times that a block had a wrong checksum. Such a block is computed by this engine."""
    lost_prompts: int = 0
    """Prompts that a peer did not finish."""
    waiting_prompts: int = 0
    """Prompts that a peer computes now, or that wait for room in this engine's cache."""
    usable_peers: int = 0
    """Peers that accept prompts of this engine now."""
    stored_blocks: int = 0
    """Blocks that were sent to the store."""
    fetched_blocks: int = 0
    """Blocks that were received from the store."""
    unacknowledged_blocks: int = 0
    """Blocks that were sent, to engines or to the store, and are not acknowledged yet."""
    store_connected: bool = False
    """Whether there is a usable connection to the store."""


class BlockTransfers:
    """All connections over which one engine exchanges cache blocks. Only one thread may use it at a time."""

    def __init__(
        self, engine: Engine, setup: TransferSetup, submit: Submit, grammars: GrammarJobs | None = None
    ) -> None:
        """Listen at `setup.address`, and connect to the store and to peers later.

        `submit` submits the sequences of a request to the engine. `grammars` compiles the grammars of prompts of other engines. Raises
        BadInput if it is not possible to listen at `setup.address`.
        """
        self._blocks = blocks = engine.prefix_blocks()
        self._store = None if setup.store is None else StoreClient(blocks, setup.store, setup.key)
        self._submit = submit
        self._fetching = set[int]()
        """Ids of the sequences whose prompts are being fetched from the store."""
        self._unwanted = set[int]()
        """The ids in `_fetching` whose sequences were aborted."""
        self._sender = None
        if setup.address is not None:
            listening = listen(setup.address)
            self._sender = PrefillJobs(engine, blocks, listening, setup.key, setup.seconds, self._store, grammars)
        peers = [address for address in setup.peers if address != setup.address]
        self._receiver = RemotePrefill(blocks, peers, setup.key, setup.seconds, submit)
        self._selector = selectors.DefaultSelector()
        self._watched: dict[int, tuple[FrameSocket, int]] = {}
        """By file descriptor: the connections that are registered in the selector, and the events for which they are."""
        self._next_tick = 0.0
        if self._sender is not None:
            self._selector.register(self._sender.listening, selectors.EVENT_READ, self._sender.accept)
        self.use_new_weights()
        self.use_role(setup.role)

    def use_role(self, role: Role) -> None:
        """Set the role. It applies to new prompts; prompts that are being computed are finished."""
        if self._sender is not None:
            self._sender.accepting = role != "decode"
            self._sender.report_load()
        self._receiver.enabled = role == "decode"
        self._receiver.connect(time.monotonic())

    def use_new_weights(self) -> None:
        """Close all connections, because their blocks belong to the old weights. This engine computes the prompts that peers had."""
        identity = self._blocks.identity()
        if self._sender is not None:
            self._sender.use_identity(identity)
        self._receiver.use_identity(identity)
        if self._store is not None:
            self._store.use_identity(identity)

    @property
    def figures(self) -> TransferFigures:
        """The numbers of blocks and prompts that were exchanged so far."""
        receiver = self._receiver
        figures = TransferFigures(
            received_blocks=receiver.received_blocks,
            damaged_blocks=receiver.damaged_blocks,
            lost_prompts=receiver.lost_prompts,
            waiting_prompts=len(receiver.prompts),
            usable_peers=sum(peer.usable for peer in receiver.peers),
        )
        sender = self._sender
        if sender is not None:
            figures = figures._replace(
                sent_blocks=sender.sent_blocks, unacknowledged_blocks=sender.unacknowledged_blocks
            )
        store = self._store
        if store is None:
            return figures
        return figures._replace(
            damaged_blocks=figures.damaged_blocks + store.damaged_blocks,
            stored_blocks=store.stored_blocks,
            fetched_blocks=store.fetched_blocks,
            unacknowledged_blocks=figures.unacknowledged_blocks + store.unacknowledged_blocks,
            store_connected=store.usable,
        )

    def begin(self, request: Mapping[str, Any]) -> bool:
        """Fetch the prompt of a request from the store, or let a peer compute it, and return true.

        If it returns false, the caller must submit the request to the engine.
        """
        if self._store is None:
            return self._receiver.begin(request)
        self._fetching.update(request["ids"])
        self._store.fetch(request["tokens"], request["salt"], partial(self._begin_fetched, request))
        return True

    def _begin_fetched(self, request: Mapping[str, Any]) -> None:
        """Go on with a request after its prompt was fetched: let a peer compute the rest, or submit the request to the engine."""
        ids = set(request["ids"])
        wanted = not ids <= self._unwanted
        self._fetching -= ids
        self._unwanted -= ids
        if wanted and not self._receiver.begin(request):
            self._submit(request, None)

    def publish(self, number: int, request: Mapping[str, Any]) -> None:
        """Send the prompt blocks of the engine's request `number` to the store, as they are computed."""
        if self._store is not None:
            self._store.publish(number, request["tokens"], request["salt"])

    def abort(self, ids: Sequence[int]) -> None:
        """Abort sequences whose prompts are being fetched from the store or computed by peers."""
        self._unwanted.update(self._fetching.intersection(ids))
        self._receiver.abort(ids)

    def after_step(self, updates: Sequence[Update]) -> Sequence[Update]:
        """Send the blocks that a step has computed to the store and to other engines.

        Returns the updates of the requests that are not prompts of other engines.
        """
        if self._store is not None:
            self._store.after_step(updates)
        if self._sender is not None:
            updates = self._sender.after_step(updates)
        return updates

    def wait(self, own: Sequence[int], busy: Callable[[], bool]) -> None:
        """Process the messages of peers, other engines and the store.

        If the engine is not `busy`, wait first, at most `TICK_SECONDS`, for a message or for data at one of the file descriptors `own`.
        """
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
        """Close connections that are late, and connect to peers that are not connected.

        It is called after the messages that have arrived were processed.
        """
        self._receiver.end_late(now)
        self._receiver.connect(now)
        if self._store is not None:
            self._store.tick(now)
        if self._sender is not None:
            self._sender.end_late(now)

    def _watch(self) -> None:
        """Register new connections in the selector, remove closed ones, and update the events of the others."""
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
