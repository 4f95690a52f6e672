"""A model of the cache for tests of the batching policy: what each slot of each block holds after each step.

What a slot holds stands for a key and value: a hash of the salt and of all tokens up to its position. A new token is a
function of this hash, so a request's text depends on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.policies.batch_request import CacheGroup, EngineStep, Request, RequestEnded, RequestPart
from meshwright.policies.batching import BatchPolicy
from meshwright.policies.cache_blocks import CacheBlocks

STOP = 0
"""Token that ends a request."""
VOCABULARY = 4


def text_after(tokens: list[int], salt: str, new_tokens: int) -> list[int]:
    """The new tokens of a prompt, up to and with the stop token."""
    tokens, count = list(tokens), len(tokens)
    while len(tokens) < count + new_tokens and (len(tokens) == count or tokens[-1] != STOP):
        tokens.append(next_token(contents(tokens, salt)[-1]))
    return tokens[count:]


def contents(tokens: list[int], salt: str) -> list[int]:
    value, values = hash(("salt", salt)), []
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return values


def next_token(content: int) -> int:
    value = content // 7 % 16
    return 1 + value % (VOCABULARY - 1) if value else STOP


@dataclass
class Outcome:
    """Result of a computed step: for each sampling part its new tokens."""

    step: EngineStep
    tokens: list[list[int]]
    fails: bool


@dataclass
class CacheModel:
    """Computes steps and checks every read and write of the cache, the limits and the order of positions."""

    policy: BatchPolicy[CacheBlocks]
    groups: list[CacheGroup]
    slots: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """Content by (group, block, slot)."""
    texts: dict[int, list[int]] = field(default_factory=dict)
    """All tokens of each request, as the device knows them."""
    next_position: dict[tuple[int, int], int] = field(default_factory=dict)
    """First position that is not computed yet, by request and computation."""
    previous: list[tuple[RequestPart, int, list[list[int]]]] = field(default_factory=list)
    """Parts of the last step, with `start` and tables as they were."""
    failed: set[int] = field(default_factory=set)
    """Requests of steps that were not computed."""

    def add(self, request: Request) -> None:
        self.policy.add(request)
        self.texts[request.number] = list(request.prompt)

    def compute(self, step: EngineStep, wrong_drafts: int = 0, fails: bool = False) -> Outcome:
        """Compute a step; in each decode with drafts, the last `wrong_drafts` of them are rejected.

        A step that fails leaves useless contents in its slots.
        """
        if fails:
            self.failed |= {part.request.number for part in step.parts}
        assert 0 < sum(part.count for part in step.parts) == step.tokens <= self.policy.limits.tokens + step.decodes
        assert self.policy.running <= self.policy.limits.sequences
        assert len({part.request.number for part in step.parts}) == len(step.parts)
        self._check_unchanged(step)
        written: set[tuple[int, int, int]] = set()
        outcome = Outcome(step, [], fails)
        chains = {}
        for index, part in enumerate(step.parts):
            text = self.texts[part.request.number]
            decode = index < step.decodes
            accepted = max(part.count - 1 - wrong_drafts, 0) if decode else 0
            for _ in range(accepted):
                text.append(next_token(contents(text, part.request.salt)[-1]))
            known = part.tokens[part.start : part.start + part.count]
            assert known == text[part.start : part.start + part.count][: len(known)]
            assert decode or len(known) == part.count
            # Rejected drafts are written too, with contents that nothing may read later.
            chain = contents(text + [VOCABULARY] * (part.count - 1 - accepted if decode else 0), part.request.salt)
            chains[part.request.number] = chain
            self._check_position(part, accepted if decode else part.count - 1)
            self._write(part, chain, written)
            if part.samples:
                assert part.start + (accepted + 1 if decode else part.count) == len(text)
                text.append(next_token(chain[len(text) - 1]))
                outcome.tokens.append(text[part.start + 1 :] if decode else text[-1:])
        for part in step.parts:
            if part.request.number not in self.failed:
                self._check_reads(part, chains[part.request.number])
        return outcome

    def _check_unchanged(self, step: EngineStep) -> None:
        """A caller that keeps parts and tables of the last step only needs `unchanged` and `grown`."""
        if step.unchanged:
            assert [part for part, *_ in self.previous] == step.parts
            assert all(part.start == start + 1 and part.count == 1 for part, start, _ in self.previous)
            changed = [index for index, (part, _, tables) in enumerate(self.previous) if part.tables != tables]
            assert step.grown == changed
        self.previous = [(part, part.start, [list(table) for table in part.tables]) for part in step.parts]

    def _check_position(self, part: RequestPart, last: int) -> None:
        """Each position is computed once in each computation, after a prefix of whole cached blocks."""
        key = (part.request.number, part.computation)
        expected = self.next_position.get(key)
        if expected is None:
            assert part.start % self.policy.cache.tokens_per_block == 0
        else:
            assert part.start == expected
        self.next_position[key] = part.start + last + 1

    def _write(self, part: RequestPart, chain: list[int], written: set[tuple[int, int, int]]) -> None:
        size = self.policy.cache.tokens_per_block
        for group, table in enumerate(part.tables):
            for position in range(part.start, part.start + part.count):
                slot = (group, table[position // size], position % size)
                assert slot[1] != 0 and slot not in written
                assert self.policy.cache.pools[group].references[slot[1]] == 1, "a shared block is written"
                written.add(slot)
                self.slots[slot] = chain[position] if part.request.number not in self.failed else 0

    def _check_reads(self, part: RequestPart, chain: list[int]) -> None:
        size = self.policy.cache.tokens_per_block
        for group, table in enumerate(part.tables):
            window = self.groups[group].window or len(chain)
            for position in range(max(part.start - window + 1, 0), part.start + part.count):
                assert self.slots[group, table[position // size], position % size] == chain[position]

    def complete(self, outcome: Outcome) -> list[RequestEnded]:
        """Give the results of a step to the policy; a stop token ends a request, and tokens after it are dropped."""
        step, stopped, delivered = outcome.step, set(), []
        for part, tokens in zip(step.sampling, outcome.tokens, strict=True):
            if STOP in tokens:
                tokens = tokens[: tokens.index(STOP) + 1]
                stopped.add(part.request.number)
            delivered.append(tokens)
        if step.drafts:
            self.policy.complete_drafts(step, delivered, stopped)
        else:
            self.policy.complete(step, [tokens[0] for tokens in delivered], stopped)
        check_blocks(self.policy)
        return self.policy.drain_ended()


def check_blocks(policy: BatchPolicy[CacheBlocks]) -> None:
    """Reference counts are those of the tables, and each block is in use, cached or empty."""
    for group, pool in enumerate(policy.cache.pools):
        references = [0] * (pool.blocks + 1)
        for progress in policy._progress.values():
            for block in progress.tables[group]:
                references[block] += block != 0
        assert references == pool.references
        used = {block for block, count in enumerate(references) if count}
        assert sorted([*used, *pool._idle, *pool._empty]) == list(range(1, pool.blocks + 1))
        assert pool.free == len(pool._idle) + len(pool._empty)
        assert all(pool.block_of[digest] == block for block, digest in pool._digest_of.items())
        assert len(pool.block_of) == len(pool._digest_of) and set(pool._idle) <= set(pool._digest_of)
