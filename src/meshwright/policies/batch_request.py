"""Requests to an inference engine, and the steps in which batches of them are computed.

A position is the index of a token in its request, from 0: first the prompt, then the new tokens. A part of a request in a step is a range
of consecutive positions. If a part ends at the last known token, the model samples the next token there. Three cases of this:

- A decode is a part of one token, the newest one.
- A preempted request is computed again like a longer prompt: prompt and new tokens together.
- If all known tokens except the newest are cached, a request begins with a decode.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from meshwright.spec.errors import BadInput

Reason = Literal["length", "stop", "deadline", "abort", "failed"]
LARGEST_PRIORITY = 2**31 - 1
"""Priorities are in [-LARGEST_PRIORITY, LARGEST_PRIORITY]."""
LONGEST_SALT = 256
"""Characters in a salt, at most."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue."""

    number: int
    """Identity. All requests of a policy have different numbers."""
    prompt: Sequence[int]
    """Token ids in [0, 2**32), at least one. In simulations it may be `bytes` whose values do not matter; only the length counts."""
    new_tokens: int
    """Maximum number of new tokens, at least 1."""
    priority: int = 0
    """Requests with a larger number go first, within the limit of `BatchLimits.priority_seconds`."""
    deadline: float | None = None
    """Time in seconds at which the request is ended if it has not ended before."""
    arrival: float = 0.0
    """Arrival time in seconds, on the same clock as `now` in the policy's methods."""
    samples_of: int | None = None
    """Number of another request with the same prompt. This request waits until that prompt is computed, then shares its blocks."""
    salt: str = ""
    """Requests share cached blocks only with requests of the same salt. This also holds across engines and stores."""
    given: Sequence[int] = ()
    """New tokens that are already known. Generation continues after them."""
    continued_elsewhere: bool = False
    """Whether another engine continues this request after one token. Then the last, partly filled block of the prompt is cached too."""
    computes_all: bool = False
    """Whether every prompt token must be computed because its logits are needed. Then no block is taken from the prefix cache."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a step and of the batch, and rules of admission."""

    tokens: int
    """Prefill tokens in a step, at most. Decodes come in addition, so a prompt of this length always fits into one step."""
    sequences: int
    """Requests that may have cache blocks at the same time."""
    prefix_cache: bool = True
    """Whether requests with equal prefixes share cached blocks. If not, only samples of the same prompt share."""
    priority_seconds: float = 60.0
    """Seconds that one level of priority is worth.

    A request of priority 1 goes before requests of priority 0 that arrived up to this many seconds earlier. The order of two requests never
    changes, and only finitely many requests go before any given request, so none starves.
    """
    reserve: float = 0.01
    """Fraction of all blocks that must stay free when a request is admitted, so that running requests can grow."""

    def turn(self, arrival: float, priority: int) -> float:
        """Sort key for the order of requests: the smallest goes first."""
        return arrival - priority * self.priority_seconds

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.tokens < 1:
            problem = f"{self.tokens} tokens a step, {self.sequences} sequences"
            raise BadInput(f"limits of a batch: {problem}; expected at least one of each")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The cache blocks of all layers with the same attention."""

    blocks: int
    """Number of blocks. Block 0 never stores tokens. Block tables contain it in place of blocks that have left the attention window."""
    window: int | None = None
    """Tokens that a query attends to, including its own; None if it attends to all."""


class RequestProgress:
    """The state of an unfinished request. The policy owns it; others only read `tokens`."""

    __slots__ = (
        "cached",
        "computation",
        "computed",
        "confirmed",
        "digests",
        "draining",
        "ended",
        "expected",
        "final",
        "generation",
        "key",
        "live",
        "part",
        "registered",
        "request",
        "salt",
        "shares",
        "tables",
        "tail",
        "tokens",
        "total",
    )

    def __init__(self, request: Request, key: tuple[float, int], groups: int, salt: str | None) -> None:
        self.request = request
        self.key = key
        """Sort key: the request with the smallest key goes first."""
        self.salt = salt or f"/{request.number}"
        """Salt of the digests of its blocks. If the request shares with no other, the salt is made from its number."""
        self.shares = salt is not None
        """Whether its full blocks are registered in the prefix cache.

        Blocks of the prompt are registered when they are computed. Blocks of new tokens are registered only when the request loses its
        blocks, because hashing each one at once would take as long as the rest of a decode step.
        """
        prompt = request.prompt
        self.tokens: MutableSequence[int] = bytearray(prompt) if isinstance(prompt, bytes) else list(prompt)
        """The prompt and the new tokens so far."""
        self.tokens.extend(request.given)
        self.total = len(request.prompt) + request.new_tokens
        """Maximum number of tokens, prompt included."""
        self.final = self.total - 2
        """Position whose logits give the last token. With 3 prompt tokens and 2 new ones (positions 0 to 4) it is 3."""
        self.expected = len(self.tokens)
        """Number of tokens that its next prefill computes. Some of them may still be in flight when the request is preempted."""
        self.live = False
        """Whether the request has a slot in the batch, and blocks."""
        self.ended = self.draining = False
        """`ended`: the request has ended. `draining`: its last part is planned or in flight."""
        self.part: RequestPart | None = None
        """The decode part of the request; None while its prompt is computed."""
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        """Block ids, one table for each group."""
        self.digests: list[bytes] = []
        """Digests of its first full blocks, as far as they were computed."""
        self.tail: bytes | None = None
        """Digest of the prompt's last block if that block is not full; None if it is full, or if the digest is not known yet."""
        self.cached: int | None = None
        """Prompt tokens found in the prefix cache when the request was first admitted; None before that."""
        self.generation = 0
        """Generation of the weights for which `digests` were computed."""
        self.computation = 0
        """How often the request lost its blocks. It tells whether a result in flight is from the current computation."""
        self.computed = self.confirmed = self.registered = 0
        """`computed`: tokens planned so far. `confirmed`: tokens in completed steps. `registered`: blocks in the prefix cache.

        `computed` and `confirmed` are updated during prefill only.
        """

    @property
    def new_tokens(self) -> int:
        """Number of new tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    def confirmed_positions(self) -> int:
        """Number of positions whose keys and values are in the cache because their steps are completed."""
        # During decode, all tokens except the newest are computed.
        return len(self.tokens) - 1 if self.confirmed >= self.expected else self.confirmed


class RequestPart:
    """Consecutive tokens of one request in a step: positions `start` … `start + count - 1`.

    A request has one decode part, which is reused in every step: `start` increases by one when the next step is planned.
    """

    __slots__ = ("computation", "count", "limit", "progress", "request", "samples", "start", "tables", "tokens")

    def __init__(self, progress: RequestProgress, start: int, count: int, samples: bool) -> None:
        self.progress = progress
        self.start = start
        self.count = count
        self.samples = samples
        """Whether a new token is sampled from the logits of the last position."""
        self.request = progress.request
        self.tokens = progress.tokens
        """The request's tokens so far. If a decode is planned ahead, the token at position `start` is not known yet."""
        self.tables = progress.tables
        """Block ids, one table for each group. They cover at least `start + count` positions."""
        self.computation = progress.computation
        self.limit = 0
        """Position at which the decode needs a new block, or reaches its last token."""

    @property
    def blocks(self) -> list[int]:
        """The block table of the first group."""
        return self.tables[0]


@dataclass(slots=True, eq=False)
class EngineStep:
    """Batch of one engine step. Parts and tables are valid until the policy plans the next step."""

    number: int
    parts: list[RequestPart] = field(default_factory=list)
    """Decodes first, then prefill chunks. Callers must not change the list."""
    decodes: int = 0
    """Number of decode parts. Each has one token, plus the planned draft tokens."""
    tokens: int = 0
    """Number of tokens in all parts."""
    sampling: list[RequestPart] = field(default_factory=list)
    """Parts that give a new token, in the order of `parts`."""
    repeat: int = 1
    """Number of identical decode steps that this object represents. If it is above 1, `start` of each part belongs to the last of them."""
    unchanged: bool = False
    """Whether the parts are the same as in the step before, each one token further."""
    grown: list[int] = field(default_factory=list)
    """If `unchanged`: indices of the parts whose block tables have changed since the step before."""
    final: list[RequestProgress] = field(default_factory=list)
    """Requests that get their last possible token in this step."""
    drafts: bool = False
    """Whether any part has draft tokens."""
    released: int = 0
    """Value of `RunningBatch.released` when the step was planned."""


class RequestEnded(NamedTuple):
    """The end of a request."""

    number: int
    reason: Reason
    new_tokens: int
