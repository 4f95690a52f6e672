"""The HTTP process's connection to the engine: sends requests, and gives each HTTP request the output of its sequences."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from meshwright.serve.failures import ENGINE_FAILED, NotFinite
from meshwright.serve.figures import EngineFigures
from meshwright.server.engine_probe import EngineProbe
from meshwright.server.messages import ServerMessageReader, encode
from meshwright.server.metrics import ServerMetrics
from meshwright.server.packed_ids import ids_as_text
from meshwright.server.transfers import TransferFigures
from meshwright.spec.deployment import Role
from meshwright.spec.errors import EXIT_COMMUNICATION, BadInput

Reason = Literal["stop", "length", "abort", "deadline", "failed", "refused"]
SEQUENCES_AT_ONCE = 4
"""In one turn of the event loop, this many sequences of a step get their tokens. Between two turns, new requests are read."""

NEWS_AT_ONCE = 64
"""The reader of an answer that is not streamed is woken each time when this many news wait.

So the work for a long text is done in parts while the text is generated, and not all at its end.
"""


class News(NamedTuple):
    """The output of one step for one sequence of a request."""

    index: int
    """Index of the sequence within the request, from 0."""
    tokens: Sequence[int]
    """New tokens."""
    reason: Reason | None = None
    """Reason why the sequence has ended; None if it has not ended."""
    error: str | None = None
    """Error message, with the reasons "failed" and "refused"."""
    code: str | None = None
    """Kind of the error, as in `server/errors.py`."""
    logprobs: Sequence[Any] = ()
    """For each new token: its log probability, and `[[token, log probability], …]` of the likeliest tokens."""
    stop_token: int | None = None
    """The stop id that ended the sequence, with the reason "stop"; None if a stop string ended it."""
    score: float | None = None
    """The score of the sequence by a reward model."""
    prompt_logprobs: Sequence[str] | None = None
    """Log probabilities of the next prompt tokens, as `PromptLogprobs.packed` returns them. They come before the first new token."""
    cached_tokens: int = 0
    """In the first news of a sequence: number of prompt tokens that were taken from the prefix cache.

    The samples of a prompt share its computation. So only the number of the sequence with the smallest index tells what was cached before
    the request.
    """


class Subscription:
    """A queue with the news of all sequences of one HTTP request, in order. The task that answers the request reads it."""

    def __init__(self, *, whole: bool) -> None:
        """Make an empty queue.

        `whole` is for an answer that is not streamed: then the reader is woken only when all sequences have ended, or when `NEWS_AT_ONCE`
        news wait.
        """
        self._news: list[News] = []
        self._whole = whole
        self._waiter: asyncio.Future[None] | None = None
        self.unfinished = 0
        """Number of sequences that have not ended."""
        self.closed = False
        """Whether the client has disconnected."""

    def add(self, news: News) -> None:
        """Append news, and wake the reader if it should read now (see `__init__`)."""
        self._news.append(news)
        if not self._whole or self._readable:
            self.wake()

    @property
    def _readable(self) -> bool:
        return bool(self._news) and (not self._whole or not self.unfinished or len(self._news) >= NEWS_AT_ONCE)

    def close(self) -> None:
        """Note that the client has disconnected. From now on `next` returns no news."""
        self.closed = True
        self.wake()

    def wake(self) -> None:
        """Let a waiting call of `next` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> list[News]:
        """Wait for news, and return all news since the last call. The list is empty if the client has disconnected."""
        if self.closed:
            return []
        if not self._readable:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news = self._news
        self._news = []
        return [] if self.closed else news


@dataclass(slots=True)
class _Text:
    """An unfinished sequence of the engine, as the HTTP process sees it."""

    subscription: Subscription
    """The queue that gets its news."""
    index: int
    """Index of the sequence within its request."""
    prompt_tokens: int
    """Number of tokens of its prompt."""
    queued: float
    """Time when the sequence was submitted."""
    last: float
    """Time when its newest tokens arrived; before its first token, the time when it was submitted."""
    first: float = 0.0
    """Time when its first token arrived."""
    tokens: int = 0
    """Number of new tokens so far."""


@dataclass(kw_only=True)
class EngineRequest:
    """A request to the engine: one prompt, continued by one or more sequences."""

    tokens: Sequence[int]
    """Token ids of the prompt."""
    new_tokens: int
    """Largest number of new tokens of each sequence."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingOptions`."""
    stop_ids: Sequence[int] = ()
    grammar: tuple[str, str] | None = None
    """Notation and text of a `Grammar`."""
    count: int = 1
    """Number of sequences."""
    priority: int = 0
    """Requests with a larger number go first. In HTTP requests a smaller number goes first, as in vLLM, so their reader negates it."""
    salt: str = ""
    """The field `cache_salt`: only requests with equal salt share cached blocks, in all engines and in the store."""


class EngineClient(asyncio.Protocol):
    """The HTTP process's connection to the engine's process. Only the thread of the event loop may call its methods."""

    def __init__(
        self, metrics: ServerMetrics, clock: Callable[[], float] = time.perf_counter, *, exchanges: bool = False
    ) -> None:
        """`exchanges` says whether the engine exchanges cache blocks with other engines."""
        self.metrics = metrics
        self._clock = clock
        self.ready: Mapping[str, int] | None = None
        """Sizes of the engine: "context", "vocab" and "sequences". None until the engine is ready."""
        self.weights: Mapping[str, Any] = {}
        """The checkpoint that is served, and newer checkpoints that are damaged. Empty if the folder is not a run."""
        self.warning: str | None = None
        """A warning about the weights for the operator; None if there is none."""
        self.failure: tuple[str, int] | None = None
        """Message and exit code of the failure after which the engine cannot go on; None if it has not failed."""
        self.failure_key: str | None = None
        """The setting that caused the failure, if a setting did."""
        self.paused = False
        """Whether the engine computes no steps; see `pause`."""
        self.figures = EngineFigures()
        """The load of the engine after the last step."""
        self.transfers = TransferFigures() if exchanges else None
        """Figures of the exchange of blocks with other engines; None without such an exchange."""
        self.probe = EngineProbe(self)
        """Checks whether the model still computes finite logits."""
        self.changed = asyncio.Event()
        """An event that is set when the engine becomes ready or fails."""
        self._transport: asyncio.WriteTransport | None = None
        self._reader = ServerMessageReader()
        self._texts: dict[int, _Text] = {}
        self._numbers = itertools.count()
        self._loading: dict[str, asyncio.Future[str | None]] = {}
        self._closing = False
        self._entries: Iterator[Sequence[Any]] = iter(())
        """Entries of the newest step that are not passed on to subscriptions yet."""
        self._step_arrived = 0.0
        """Time when the message of the newest step arrived."""
        self._scheduled = False
        """Whether a call of `_pass_on_some` is scheduled in the event loop."""

    @property
    def unfinished(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._texts)

    @property
    def usable(self) -> bool:
        """Whether requests can be submitted."""
        return self.ready is not None and self.failure is None

    def submit(self, request: EngineRequest, subscription: Subscription, first_index: int) -> list[int]:
        """Send a request to the engine. Returns the ids of its sequences.

        The news of the sequences are added to `subscription`, with the indices `first_index`, `first_index` + 1, and so on.
        """
        now = self._clock()
        ids = list(itertools.islice(self._numbers, request.count))
        for offset, id in enumerate(ids):
            self._texts[id] = _Text(subscription, first_index + offset, len(request.tokens), now, now)
        subscription.unfinished += len(ids)
        self._send(
            {
                "submit": {
                    "ids": ids,
                    "tokens": ids_as_text(request.tokens),
                    "new_tokens": request.new_tokens,
                    "sampling": request.sampling,
                    "stop_ids": list(request.stop_ids),
                    "grammar": request.grammar,
                    "priority": request.priority,
                    "salt": request.salt,
                }
            }
        )
        return ids

    async def first_token(self, prompt: Sequence[int]) -> str | None:
        """Generate one token after a prompt. Returns None, or the code of the error if that fails."""
        subscription = Subscription(whole=True)
        self.submit(EngineRequest(tokens=prompt, new_tokens=1), subscription, 0)
        return (await subscription.next())[-1].code

    def abort(self, ids: Sequence[int], reason: str = "abort") -> None:
        """End sequences, of which no further news come. Ids of sequences that have already ended are ignored."""
        ended = [id for id in ids if id in self._texts]
        for id in ended:
            self._forget(id, reason)
        if ended:
            self._send({"abort": ended})

    def abort_all(self) -> None:
        """End all sequences with the reason "abort"."""
        for id, text in list(self._texts.items()):
            self.abort([id])
            text.subscription.add(News(text.index, (), "abort"))

    def pause(self, paused: bool) -> None:
        """Let the engine stop computing steps, or go on if `paused` is false. Requests that are submitted during a pause wait."""
        self.paused = paused
        self._send({"pause": paused})

    def use_role(self, role: Role) -> None:
        """Change the engine's role. It applies to requests that are submitted from now on."""
        self._send({"role": role})

    async def load(self, folder: Path) -> None:
        """Load new weights from `folder` into the engine, and wait until it has done so. The next step uses them.

        Raises BadInput, with the engine's message, if the engine cannot load them.
        """
        key = str(folder)
        if self.failure is not None:
            raise BadInput(self.failure[0])
        if key not in self._loading:
            self._loading[key] = asyncio.get_running_loop().create_future()
            self._send({"load": key})
        if (error := await asyncio.shield(self._loading[key])) is not None:
            raise BadInput(error)
        self.weights = {}

    def close(self) -> None:
        """Close the connection, which ends the engine's process."""
        self._closing = True
        self.probe.close()
        if self._transport is not None:
            self._transport.close()

    def fail(self, message: str, code: int, key: str | None = None) -> None:
        """Note that the engine cannot go on, and end all sequences with the reason "failed".

        `code` is the exit code of the server, `key` the setting that caused the failure, if a setting did.
        """
        if self.failure is not None:
            return
        self._pass_on(self._entries)
        self.failure = (message, code)
        self.failure_key = key
        self.changed.set()
        for id, text in list(self._texts.items()):
            self._forget(id, "failed")
            text.subscription.add(News(text.index, (), "failed", message, ENGINE_FAILED))
        for future in self._loading.values():
            if not future.done():
                future.set_result(message)
        self._loading.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closing:
            self.fail("the engine's process has ended", EXIT_COMMUNICATION)

    def data_received(self, data: bytes) -> None:
        for message in self._reader.add(data):
            self._pass_on(self._entries)
            if (step := message.get("step")) is not None:
                self.figures = EngineFigures(*message["figures"])
                self._take_step(step)
            else:
                self._take(message)

    def _take_step(self, entries: Sequence[Sequence[Any]]) -> None:
        """Pass the entries of a step on to the subscriptions, in several turns of the event loop.

        An entry is `[id, tokens]` or `[id, tokens, details]`. Sequences that get their first tokens come first, because their clients have
        nothing to show yet.
        """
        self._step_arrived = self._clock()
        texts = self._texts
        first = []
        others = []
        new_tokens = 0
        for entry in entries:
            if (text := texts.get(entry[0])) is not None:  # A sequence that was aborted is not there any more.
                (others if text.tokens else first).append(entry)
                new_tokens += len(entry[1])
        self.metrics.count_step(new_tokens)
        if new_tokens:
            self.probe.note_tokens()
        self._pass_on(first)
        self._entries = iter(others)
        if first:
            self._schedule()
        else:
            self._pass_on_some()

    def _pass_on_some(self) -> None:
        self._scheduled = False
        entries = list(itertools.islice(self._entries, SEQUENCES_AT_ONCE))
        self._pass_on(entries)
        if len(entries) == SEQUENCES_AT_ONCE:
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pass_on_some)

    def _pass_on(self, entries: Iterable[Sequence[Any]]) -> None:
        """Add entries to the subscriptions of their sequences, and count their tokens in the metrics."""
        now = self._step_arrived
        texts = self._texts
        metrics = self.metrics
        for entry in entries:
            if (text := texts.get(entry[0])) is None:
                continue
            if tokens := entry[1]:
                if text.tokens:
                    metrics.count_tokens(now - text.last, len(tokens))
                else:
                    metrics.count_first_token(now - text.queued)
                    text.first = now
                text.tokens += len(tokens)
                text.last = now
            if len(entry) == 2:
                text.subscription.add(News(text.index, tokens))
                continue
            news = News(text.index, tokens, **entry[2])
            if news.reason is not None:
                self._forget(entry[0], news.reason)
            if news.code == NotFinite.code:
                self.metrics.not_finite += 1
                self.probe.note_not_finite()
            text.subscription.add(news)

    def _take(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.ready = message["ready"]
            self.weights = message.get("weights", {})
            self.warning = message.get("warning")
            self.changed.set()
        elif "refused" in message:
            for id in message["refused"]:
                if (text := self._texts.get(id)) is not None:
                    self._forget(id, "refused")
                    text.subscription.add(News(text.index, (), "refused", message["error"], message["code"]))
        elif "transfers" in message:
            self.transfers = TransferFigures(*message["transfers"])
            self.figures = EngineFigures(*message["figures"])
        elif "loaded" in message:
            future = self._loading.pop(message["loaded"])
            if not future.done():
                future.set_result(message["error"])
            if message["error"] is None:  # The probe tests whether the new weights give NaN.
                self.probe.start()
        elif "failed" in message:
            self.fail(message["failed"], message["code"], message["key"])

    def _forget(self, id: int, reason: str) -> None:
        text = self._texts.pop(id)
        text.subscription.unfinished -= 1
        if reason != "refused":
            decoding = text.last - text.first
            whole = self._clock() - text.queued
            self.metrics.count_request(reason, text.prompt_tokens, text.tokens, decoding, whole)

    def _send(self, message: dict[str, Any]) -> None:
        if self._transport is not None and self.failure is None:
            self._transport.write(encode(message))


async def connect(client: EngineClient, end: socket.socket) -> None:
    """Connect `client` to the engine's process through the connected socket `end`."""
    end.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: client, end)
