"""Requests to an inference engine, and the steps in which a batch of them is computed.

Positions count a request's tokens from 0: first the prompt, then the new tokens. A part that ends at the last known token
samples the next one. So a decode is a part of one token, and a preempted request is computed again like a longer prompt. A
request of which all known tokens but the newest are cached begins with a decode.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from meshwright.spec.errors import BadInput

Reason = Literal["length", "stop", "deadline", "abort", "failed"]
LARGEST_PRIORITY = 2**31 - 1
"""Priorities are from the negative of this to it."""
LONGEST_SALT = 256
"""Characters of a salt at most."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue."""

    number: int
    """Identity; no two requests of a policy have the same."""
    prompt: Sequence[int]
    """Token ids, each in [0, 2**32); at least one. Those of `bytes`, of a simulation, are only counted."""
    new_tokens: int
    """New tokens at most; at least 1."""
    priority: int = 0
    """Requests of a larger number go first, within the limit of `BatchLimits.priority_seconds`."""
    deadline: float | None = None
    """Time in seconds at which the request ends in any case."""
    arrival: float = 0.0
    """Time in seconds of the same clock as `now` of the policy's methods."""
    samples_of: int | None = None
    """Number of another request with the same prompt; this one waits until that prompt is computed, then shares its blocks."""
    salt: str = ""
    """Only requests of equal salt share cached blocks, here and in other engines and stores."""
    given: Sequence[int] = ()
    """New tokens that are known already; the text goes on after them."""
    continued_elsewhere: bool = False
    """Whether another engine continues the text after one token: the block with the prompt's end is then cached too."""
    computes_all: bool = False
    """Whether all its tokens are computed: it takes no block from the prefix cache, since the logits of each are needed."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a step and of the batch, and rules of admission."""

    tokens: int
    """Tokens of a step at most, beside the one of each decode: a prompt of so many is computed at once in any batch."""
    sequences: int
    """Requests that hold cache blocks at a time, at most."""
    prefix_cache: bool = True
    """Whether requests share cached blocks of equal prefixes; without it only samples of one prompt do."""
    priority_seconds: float = 60.0
    """A request goes before those that came up to so many seconds earlier for each level of priority above theirs.

    The order of two requests never changes, and only finitely many requests go before any other: none starves.
    """
    reserve: float = 0.01
    """Fraction of the blocks that admission leaves free for the growth of running requests."""

    def turn(self, arrival: float, priority: int) -> float:
        """Order of a request among others: that of the smallest number goes first."""
        return arrival - priority * self.priority_seconds

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.tokens < 1:
            problem = f"{self.tokens} tokens a step, {self.sequences} sequences"
            raise BadInput(f"limits of a batch: {problem}; expected at least one of each")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The cache blocks of all layers with the same attention."""

    blocks: int
    """Number of blocks. Block 0 holds no tokens: it stands in block tables for those that have left the window."""
    window: int | None = None
    """Tokens that a query attends to, its own included; None for all."""


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
        """Orders requests: the smallest goes first."""
        self.salt = salt or f"/{request.number}"
        self.shares = salt is not None
        """Salt of its digests, and whether its full blocks are entered in the prefix cache.

        Those of the prompt are entered when they are computed, those of new tokens when the request loses its blocks: to
        hash them one by one would take as long as the rest of a decode step.
        """
        prompt = request.prompt
        self.tokens: MutableSequence[int] = bytearray(prompt) if isinstance(prompt, bytes) else list(prompt)
        """Prompt and new tokens so far."""
        self.tokens.extend(request.given)
        self.total = len(request.prompt) + request.new_tokens
        """Tokens at the end at most."""
        self.final = self.total - 2
        """Position whose logits give the last token."""
        self.expected = len(self.tokens)
        """Tokens that its prefill computes; some may still be in flight when its blocks are taken away."""
        self.live = False
        """Whether it holds a slot of the batch and blocks."""
        self.ended = self.draining = False
        """Whether the request has ended; whether its last part is in flight."""
        self.part: RequestPart | None = None
        """Decode part of the request; None while its prompt is computed."""
        self.tables: list[list[int]] = [[] for _ in range(groups)]
        """Block ids, one table for each group."""
        self.digests: list[bytes] = []
        self.tail: bytes | None = None
        """Digest of the last block of its prompt, which is not full; None if it is full or the digest is not known yet."""
        self.cached: int | None = None
        """Tokens of its prompt that were taken from the prefix cache when it was first admitted; None before."""
        self.generation = 0
        """Generation of weights that `digests` are for."""
        self.computation = 0
        """Number of times that its blocks were taken away."""
        self.computed = self.confirmed = self.registered = 0
        """Positions that are planned and those of completed steps, kept up during prefill; blocks in the prefix cache."""

    @property
    def new_tokens(self) -> int:
        """Number of new tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    def confirmed_positions(self) -> int:
        """Positions whose keys and values are in the cache, by the completed steps."""
        # While it decodes, all tokens but the newest are computed.
        return len(self.tokens) - 1 if self.confirmed >= self.expected else self.confirmed


class RequestPart:
    """Consecutive tokens of one request in a step: positions `start` … `start + count - 1`.

    A decode part is one object for as long as its request decodes: `start` moves on when the next step is planned.
    """

    __slots__ = ("computation", "count", "limit", "progress", "request", "samples", "start", "tables", "tokens")

    def __init__(self, progress: RequestProgress, start: int, count: int, samples: bool) -> None:
        self.progress = progress
        self.start = start
        self.count = count
        self.samples = samples
        """Whether the logits of the last position give a new token."""
        self.request = progress.request
        self.tokens = progress.tokens
        """The request's tokens so far. In a decode that is planned ahead, the token at `start` is not known yet."""
        self.tables = progress.tables
        """Block ids, one table for each group; they cover `start + count` positions and may be longer."""
        self.computation = progress.computation
        self.limit = 0
        """Position at which a decode needs a block or is at its last token."""

    @property
    def blocks(self) -> list[int]:
        """The block table of the first group."""
        return self.tables[0]


@dataclass(slots=True, eq=False)
class EngineStep:
    """Batch of one engine step. Parts and tables are valid until the policy plans the next step."""

    number: int
    parts: list[RequestPart] = field(default_factory=list)
    """Decodes first, then prefill chunks. Not to be changed."""
    decodes: int = 0
    """Number of decode parts. Each has one token, and draft tokens where they were asked for."""
    tokens: int = 0
    """Tokens of all parts."""
    sampling: list[RequestPart] = field(default_factory=list)
    """Parts that give a new token, in the order of `parts`."""
    repeat: int = 1
    """Number of identical decode steps that this one stands for; `start` is then that of the last of them."""
    unchanged: bool = False
    """Whether the parts are those of the step before, each one token further."""
    grown: list[int] = field(default_factory=list)
    """If `unchanged`: indices of the parts whose block tables differ from those of the step before."""
    final: list[RequestProgress] = field(default_factory=list)
    """Requests that reach their number of new tokens."""
    drafts: bool = False
    """Whether a part has draft tokens."""
    released: int = 0
    """`RunningBatch.released` when it was planned."""


class RequestEnded(NamedTuple):
    """The end of a request."""

    number: int
    reason: Reason
    new_tokens: int
