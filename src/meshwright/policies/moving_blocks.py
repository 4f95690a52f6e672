"""References on the blocks of a prompt while they are transferred between two processes, from reservation to copy.

Both sides identify a block by its digest. The receiver reserves empty blocks, and enters each one into the prefix cache when its content
has arrived. The sender keeps references on computed blocks, so that they are not evicted before they are copied. When the request comes, it
finds the received blocks in the prefix cache and computes the missing ones. So no transfer has to succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from meshwright.policies.cache_blocks import CacheBlocks


class ReservedBlocks:
    """The receiver's side: empty blocks for the part of a prompt that follows its cached prefix."""

    def __init__(self, cache: CacheBlocks, digests: Sequence[bytes], tokens: int | None = None) -> None:
        """Count the blocks; `take` reserves them. `tokens` is the length of the prompt; None if its last block is full."""
        self._cache = cache
        self._digests = digests
        self.cached = cache.matching(digests)
        """Blocks of the prompt that are cached already."""
        full = len(digests) if tokens is None else tokens // cache.tokens_per_block
        end = (
            full * cache.tokens_per_block
        )  # position from which the request computes if the last, partly filled block does not arrive
        self.first = max(self.cached, *(cache.first_block(group, end) for group in range(len(cache.pools))))
        """Index of the first block to receive. Earlier blocks are cached, or outside the windows of all groups."""
        self._tables: dict[int, list[int]] = {}
        self._shared: list[list[int]] = [[] for _ in cache.pools]

    def __len__(self) -> int:
        return len(self._digests) - self.first

    def fit(self, reserve: float) -> bool:
        """Whether every group has enough free blocks, and afterwards still has the fraction `reserve` of all its blocks free."""
        return all(
            pool.free - self._cache.idle_matches(group, self._digests, self.cached) - len(self)
            >= int(reserve * pool.blocks)
            for group, pool in enumerate(self._cache.pools)
        )

    def take(self) -> None:
        """Take the blocks, and add references to the cached prefix. Check with `fit` before that this is possible."""
        self._cache.share(self._shared, self._digests, self.cached)
        taken = [pool.take_all(len(self)) for pool in self._cache.pools]
        self._tables = dict(
            zip(range(self.first, len(self._digests)), map(list, zip(*taken, strict=True)), strict=True)
        )

    def blocks(self, index: int) -> list[int] | None:
        """The empty block of each group for block `index` of the prompt; None if it was not reserved, or if it is filled."""
        return self._tables.get(index)

    def tables(self, index: int, count: int) -> list[list[int]] | None:
        """For each of `count` blocks from `index` on, the empty block of each group; None if any is not reserved or is filled."""
        tables = [self._tables[block] for block in range(index, index + count) if block in self._tables]
        return tables if len(tables) == count else None

    def enter(self, index: int, count: int = 1) -> None:
        """Enter `count` blocks from block `index` on into the prefix cache, because their contents have arrived."""
        tables = [self._tables.pop(block) for block in range(index, index + count)]
        for group, (pool, shared) in enumerate(zip(self._cache.pools, self._shared, strict=True)):
            blocks = [table[group] for table in tables]
            pool.register_all(blocks, self._digests[index : index + count])
            shared.extend(blocks)

    def release(self) -> None:
        """Remove all references. Blocks that were filled stay in the prefix cache."""
        for group, pool in enumerate(self._cache.pools):
            pool.release_all([table[group] for table in self._tables.values()] + self._shared[group][::-1])
        self._tables = {}
        self._shared = [[] for _ in self._cache.pools]


class UnsentBlocks:
    """The sender's side: references on the computed blocks of a prompt, each from its computation until it is copied."""

    def __init__(self, cache: CacheBlocks, digests: Sequence[bytes], first: int) -> None:
        self._cache = cache
        self._digests = digests
        self.next = first
        """Index of the first block that is not copied yet."""
        self._tables: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._tables)

    def extend(self) -> int:
        """Add references to the next blocks of the prompt that are computed by now (cached in all groups). Returns their number."""
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
        """The next `count` blocks to copy, each as a list with its block in every group. Call `copied` afterwards."""
        return self._tables[:count]

    def split(self, count: int) -> UnsentBlocks:
        """Move the next `count` blocks, with their references, into a new object, which is returned."""
        first = UnsentBlocks(self._cache, self._digests[: self.next + count], self.next)
        first._tables = self._tables[:count]
        self._tables = self._tables[count:]
        self.next += count
        return first

    def copied(self, count: int) -> None:
        """Remove the references on the next `count` blocks, because they are copied."""
        for group, pool in enumerate(self._cache.pools):
            pool.release_all([blocks[group] for blocks in self._tables[:count]])
        del self._tables[:count]
        self.next += count

    def release(self) -> None:
        """Remove all references."""
        self.copied(len(self._tables))
