"""Cache blocks as counts, for simulated requests whose prompts share nothing: the numbers of `CacheBlocks`, in less time.

All blocks of a request form one chain, which has one digest: its list of digests repeats that. The first `cached` blocks
of a chain are in the prefix cache. A request or a reservation has references on the first `owned` blocks, a sender on some
of them. Blocks without references are idle if they are cached, else empty. Empty ones are taken first, then ends of idle chains.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from meshwright.policies.batch_request import CacheGroup
from meshwright.policies.cache_blocks import BlockPool, CacheBlocks


class Chain:
    """The blocks of one request."""

    __slots__ = ("cached", "idle", "owned", "referenced", "unsent", "unsent_start")

    def __init__(self) -> None:
        self.cached = self.owned = self.referenced = self.idle = 0
        """`referenced`: blocks with a reference."""
        self.unsent = self.unsent_start = 0
        """A sender has references on `unsent` blocks, from `unsent_start` on."""


class CountedPool(BlockPool):
    """The numbers of blocks without references, and the chains."""

    def __init__(self, blocks: int) -> None:
        super().__init__(1)
        self.blocks = self.free = self.empty = blocks - 1
        """`empty`: blocks without references and without content."""
        self.chains: dict[bytes, Chain] = {}
        self.idle: OrderedDict[int, tuple[bytes | None, Chain]] = OrderedDict()
        """Chains with blocks that are cached and have no references, the one that was released first first."""

    def own_more(self, chain: Chain, owned: int) -> None:
        """Let a request take blocks behind its own `chain.owned`, of which none is idle and no sender has references."""
        more = owned - chain.owned
        chain.owned = chain.referenced = owned
        self.free -= more
        self.empty -= more
        if self.empty < 0:
            self._evict()

    def change(
        self, digest: bytes | None, chain: Chain, *, owned: int, cached: int, unsent_start: int, unsent: int
    ) -> None:
        """Give a chain other numbers, and take or release the blocks that differ."""
        chain.owned, chain.cached, chain.unsent_start, chain.unsent = owned, cached, unsent_start, unsent
        referenced = owned + max(0, unsent_start + unsent - max(unsent_start, owned)) if unsent else owned
        more, chain.referenced = referenced - chain.referenced, referenced
        idle = cached - referenced if cached > referenced else 0
        self.free -= more
        self.empty -= more + idle - chain.idle
        if idle != chain.idle:
            chain.idle = idle
            if idle:
                self.idle[id(chain)] = digest, chain
                if more < 0:
                    self.idle.move_to_end(id(chain))
            else:
                del self.idle[id(chain)]
        if self.empty < 0:
            self._evict()

    def _evict(self) -> None:
        """Empty idle blocks until none is missing."""
        while self.empty < 0:
            digest, chain = next(iter(self.idle.values()))
            count = min(chain.idle, -self.empty)
            chain.idle -= count
            chain.cached -= count
            self.empty += count
            if not chain.idle:
                del self.idle[id(chain)]
                if not chain.cached and not chain.referenced and digest is not None:
                    self.chains.pop(digest, None)


class CountedBlocks(CacheBlocks):
    """`CacheBlocks` of one group without a window. Entries of its block tables mean nothing, only their number counts."""

    alike = True

    def __init__(self, blocks: int, tokens_per_block: int) -> None:
        super().__init__([CacheGroup(1)], tokens_per_block)
        self.pool = CountedPool(blocks)
        self.pools: list[BlockPool] = [self.pool]
        self._chain_of: dict[int, tuple[bytes | None, Chain]] = {}
        """By the identity of a request's tables."""

    def chain(self, digests: Sequence[bytes]) -> Chain:
        """The chain of a request."""
        known = self.pool.chains.get(digests[0])
        if known is None:
            known = self.pool.chains[digests[0]] = Chain()
        return known

    def matching(self, digests: Sequence[bytes]) -> int:
        """Cached blocks of a request that its next prompt takes."""
        known = self.pool.chains.get(digests[0]) if digests else None
        return 0 if known is None else min(len(digests), known.cached)

    def idle_matches(self, group: int, digests: Sequence[bytes], length: int) -> int:
        """How many of these count as free."""
        return max(0, length - self.chain(digests).referenced) if length else 0

    def share(self, tables: list[list[int]], digests: Sequence[bytes], length: int) -> None:
        """Begin `tables` with `length` cached blocks."""
        digest, chain = (digests[0], self.chain(digests)) if digests else (None, Chain())
        self._chain_of[id(tables)] = digest, chain
        tables[0].extend([1] * length)
        self._own(digest, chain, length)

    def claim(self, tables: list[list[int]], digest: bytes) -> bool:
        """Add the cached block behind those of `tables` to them, no longer cached; false if it is not cached or has references."""
        chain, held = self.pool.chains.get(digest), len(tables[0])
        if chain is None or chain.cached != held + 1 or chain.referenced != held:
            return False
        tables[0].append(1)
        self._chain_of[id(tables)] = digest, chain
        self.pool.change(
            digest, chain, owned=held + 1, cached=held, unsent_start=chain.unsent_start, unsent=chain.unsent
        )
        return True

    def room(self, tables: list[list[int]]) -> int:
        """Positions that `tables` can cover with the free blocks."""
        return (len(tables[0]) + self.pool.free) * self.tokens_per_block

    def append(self, tables: list[list[int]]) -> bool:
        """Add a block; false if there is none."""
        if not self.pool.free:
            return False
        table = tables[0]
        table.append(1)
        self._own(*self._chain_of[id(tables)], len(table))
        return True

    def grow(self, tables: list[list[int]], tokens: int) -> None:
        """Take blocks until `tables` cover `tokens` positions."""
        table, blocks = tables[0], -(-tokens // self.tokens_per_block)
        if blocks > len(table):
            table.extend([1] * (blocks - len(table)))
            self._own(*self._chain_of[id(tables)], blocks)

    def register(self, tables: list[list[int]], digests: Sequence[bytes], first: int, last: int) -> None:
        """Enter the first `last` blocks of a request in the prefix cache."""
        del first
        digest, chain = self._chain_of[id(tables)]
        if digest is None:
            digest = digests[0]
            self._chain_of[id(tables)] = digest, chain
            self.pool.chains[digest] = chain
        if last > chain.cached:
            self.pool.change(
                digest, chain, owned=chain.owned, cached=last, unsent_start=chain.unsent_start, unsent=chain.unsent
            )

    def release(self, tables: list[list[int]]) -> None:
        """Release the blocks of a request; cached ones stay in the prefix cache."""
        if id(tables) in self._chain_of:
            self._own(*self._chain_of.pop(id(tables)), 0)

    def _own(self, digest: bytes | None, chain: Chain, owned: int) -> None:
        if owned > chain.owned >= chain.cached and not chain.unsent:
            self.pool.own_more(chain, owned)
            return
        self.pool.change(
            digest, chain, owned=owned, cached=chain.cached, unsent_start=chain.unsent_start, unsent=chain.unsent
        )


class CountedReservation:
    """`policies.moving_blocks.ReservedBlocks` of a chain."""

    def __init__(self, cache: CountedBlocks, digests: Sequence[bytes]) -> None:
        self._cache, self._digests = cache, digests
        self.first = cache.matching(digests)

    def __len__(self) -> int:
        return len(self._digests) - self.first

    def fit(self, reserve: float) -> bool:
        """Whether there are so many free blocks, and the fraction `reserve` of all beside them."""
        pool = self._cache.pool
        idle = self._cache.idle_matches(0, self._digests, self.first)
        return pool.free - idle - len(self) >= int(reserve * pool.blocks)

    def take(self) -> None:
        """Take the blocks."""
        self._change(len(self._digests), self.first)

    def enter(self, index: int, count: int) -> None:
        """Put `count` blocks from `index` on into the prefix cache."""
        self._change(len(self._digests), index + count)

    def release(self) -> None:
        """Release the blocks; those that were entered stay in the prefix cache."""
        self._change(0, self._cache.chain(self._digests).cached)

    def _change(self, owned: int, cached: int) -> None:
        chain = self._cache.chain(self._digests)
        self._cache.pool.change(self._digests[0], chain, owned=owned, cached=cached, unsent_start=0, unsent=0)


class CountedUnsent:
    """`policies.moving_blocks.UnsentBlocks` of a chain."""

    def __init__(self, cache: CountedBlocks, digests: Sequence[bytes], first: int) -> None:
        self._cache, self._digests, self.next, self._count = cache, digests, first, 0

    def __len__(self) -> int:
        return self._count

    def extend(self) -> None:
        """Hold the blocks that follow, as far as they are cached."""
        chain = self._cache.chain(self._digests)
        self._count = max(0, min(chain.cached, len(self._digests)) - self.next)
        self._change(chain)

    def copied(self, count: int) -> None:
        """Release the next `count` blocks."""
        self.next, self._count = self.next + count, self._count - count
        self._change(self._cache.chain(self._digests))

    def _change(self, chain: Chain) -> None:
        pool = self._cache.pool
        pool.change(
            self._digests[0], chain, owned=chain.owned, cached=chain.cached, unsent_start=self.next, unsent=self._count
        )
