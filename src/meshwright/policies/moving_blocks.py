"""Blocks of a prompt that another process computes or takes: references on them from reservation to copy.

Both sides know a block by its digest. The receiver takes empty blocks, and enters each in the prefix cache once its
content is there; the sender keeps computed blocks from being evicted until they are copied. A request that comes later
finds the blocks in the prefix cache, and computes those that are missing: no transfer has to succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from meshwright.policies.cache_blocks import CacheBlocks


class ReservedBlocks:
    """Empty blocks of a prompt, of the receiver: those from the end of its cached prefix on."""

    def __init__(self, cache: CacheBlocks, digests: Sequence[bytes], tokens: int | None = None) -> None:
        """Count the blocks; `take` reserves them. The last block ends with the prompt's `tokens`; None: it is full."""
        self._cache = cache
        self._digests = digests
        self.cached = cache.matching(digests)
        """Blocks of the prompt that are cached."""
        full = len(digests) if tokens is None else tokens // cache.tokens_per_block
        end = full * cache.tokens_per_block  # where the request goes on if the last block does not arrive
        self.first = max(self.cached, *(cache.first_block(group, end) for group in range(len(cache.pools))))
        """Index of the first block to be filled; earlier ones are cached, or outside of all windows."""
        self._tables: dict[int, list[int]] = {}
        self._shared: list[list[int]] = [[] for _ in cache.pools]

    def __len__(self) -> int:
        return len(self._digests) - self.first

    def fit(self, reserve: float) -> bool:
        """Whether every group has so many free blocks, and the fraction `reserve` of all beside them."""
        return all(
            pool.free - self._cache.idle_matches(group, self._digests, self.cached) - len(self)
            >= int(reserve * pool.blocks)
            for group, pool in enumerate(self._cache.pools)
        )

    def take(self) -> None:
        """Take the blocks, and references on the cached prefix; `fit` says whether that is possible."""
        self._cache.share(self._shared, self._digests, self.cached)
        taken = [pool.take_all(len(self)) for pool in self._cache.pools]
        self._tables = dict(
            zip(range(self.first, len(self._digests)), map(list, zip(*taken, strict=True)), strict=True)
        )

    def blocks(self, index: int) -> list[int] | None:
        """The empty block of each group for block `index` of the prompt; None if none is reserved or it is filled."""
        return self._tables.get(index)

    def tables(self, index: int, count: int) -> list[list[int]] | None:
        """Empty blocks by group for `count` blocks from block `index` on; None if any is not reserved or is filled."""
        tables = [self._tables[block] for block in range(index, index + count) if block in self._tables]
        return tables if len(tables) == count else None

    def enter(self, index: int, count: int = 1) -> None:
        """Put `count` blocks from block `index` on, which have their content now, into the prefix cache."""
        tables = [self._tables.pop(block) for block in range(index, index + count)]
        for group, (pool, shared) in enumerate(zip(self._cache.pools, self._shared, strict=True)):
            blocks = [table[group] for table in tables]
            pool.register_all(blocks, self._digests[index : index + count])
            shared.extend(blocks)

    def release(self) -> None:
        """Return all references; blocks that were filled stay in the prefix cache."""
        for group, pool in enumerate(self._cache.pools):
            pool.release_all([table[group] for table in self._tables.values()] + self._shared[group][::-1])
        self._tables = {}
        self._shared = [[] for _ in self._cache.pools]


class UnsentBlocks:
    """References on the computed blocks of a prompt, of the sender: each from its computation until it is copied."""

    def __init__(self, cache: CacheBlocks, digests: Sequence[bytes], first: int) -> None:
        self._cache = cache
        self._digests = digests
        self.next = first
        """Index of the first block that is not copied."""
        self._tables: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._tables)

    def extend(self) -> int:
        """Take references on the blocks that follow in the prompt, as far as they are cached; returns their number."""
        pools = self._cache.pools
        following = self._digests[self.next + len(self._tables) :]
        for pool in pools:
            following = list(takewhile(pool.block_of.__contains__, following))
        blocks = [[pool.block_of[digest] for digest in following] for pool in pools]
        for pool, own in zip(pools, blocks, strict=True):
            pool.share_all(own)
        self._tables.extend(map(list, zip(*blocks, strict=True)))
        return len(following)

    def take(self, count: int) -> list[list[int]]:
        """The blocks of each group of the next `count` blocks; call `copied` when they are copied."""
        return self._tables[:count]

    def split(self, count: int) -> UnsentBlocks:
        """Move the references on the next `count` blocks into an object of their own."""
        first = UnsentBlocks(self._cache, self._digests[: self.next + count], self.next)
        first._tables = self._tables[:count]
        self._tables = self._tables[count:]
        self.next += count
        return first

    def copied(self, count: int) -> None:
        """Return the references on the next `count` blocks."""
        for group, pool in enumerate(self._cache.pools):
            pool.release_all([blocks[group] for blocks in self._tables[:count]])
        del self._tables[:count]
        self.next += count

    def release(self) -> None:
        """Return all references."""
        self.copied(len(self._tables))
