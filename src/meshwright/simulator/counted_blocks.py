"""Cache blocks of simulated requests as counts: the numbers of `CacheBlocks` without windows, in less time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.policies.cache_blocks import BlockTables, CacheBlocks
from meshwright.simulator.cache_extents import ExtentPool, Holder
from meshwright.simulator.text_pieces import Text


class CountedBlocks(BlockTables):
    """The blocks of one group without a window. Only the number of entries of its block tables counts, not their values.

    All digests of a request are the name of its text, the last one that of its prompt's end if that is meant.
    """

    alike = True

    def __init__(self, blocks: int, tokens_per_block: int, texts: Mapping[bytes, Text]) -> None:
        self.pool = ExtentPool(blocks)
        super().__init__([self.pool], [None], tokens_per_block)
        self.texts = texts
        """Sequences by name."""
        self._holders: dict[int, Holder] = {}
        """Holders by the identity of a request's tables."""

    def text(self, digests: Sequence[bytes]) -> Text:
        """The text of a request; empty if it has no digests."""
        return self.texts[digests[-1]] if digests else ()

    def matching(self, digests: Sequence[bytes]) -> int:
        return self.pool.cached_end(self.text(digests), 0, len(digests))

    def idle_matches(self, group: int, digests: Sequence[bytes], length: int) -> int:
        return self.pool.idle_blocks(self.text(digests), length) if length else 0

    def has_any(self, digests: Sequence[bytes], first: int, end: int) -> bool:
        """Whether any of the blocks `first` … `end - 1` of a request is cached."""
        return self.pool.has_any(self.text(digests), first, end)

    def share(self, tables: list[list[int]], digests: Sequence[bytes], length: int) -> None:
        holder = self._holders[id(tables)] = Holder(self.text(digests))
        if length:
            tables[0].extend([1] * length)
            self.pool.share(holder, 0, length)

    def claim(self, tables: list[list[int]], digest: bytes) -> bool:
        if not self.pool.take_cached(self._holders[id(tables)], self.texts[digest]):
            return False
        tables[0].append(1)
        return True

    def append(self, tables: list[list[int]]) -> bool:
        if not self.pool.free:
            return False
        self._append(tables, 1)
        return True

    def append_all(self, wanted: Sequence[tuple[list[list[int]], int]]) -> None:
        self.pool.take(sum([more for _, more in wanted]))
        for tables, more in wanted:
            tables[0].extend([1] * more)
            self._holders[id(tables)].private += more

    def grow(self, tables: list[list[int]], tokens: int) -> None:
        more = -(-tokens // self.tokens_per_block) - len(tables[0])
        if more > 0:
            self._append(tables, more)

    def _append(self, tables: list[list[int]], more: int) -> None:
        self.pool.take(more)
        tables[0].extend([1] * more)
        self._holders[id(tables)].private += more

    def room(self, tables: list[list[int]]) -> int:
        return (len(tables[0]) + self.pool.free) * self.tokens_per_block

    def register(self, tables: list[list[int]], digests: Sequence[bytes], first: int, last: int) -> None:
        holder = self._holders[id(tables)]
        holder.text = self.texts[digests[last - 1]]
        self.pool.enter(holder, first, last)

    def remove(self, tables: list[list[int]], digests: Sequence[bytes]) -> None:
        """Raise RuntimeError: simulated requests do not fail."""
        raise RuntimeError("simulated requests do not fail")

    def release(self, tables: list[list[int]]) -> None:
        if id(tables) in self._holders:
            self.pool.release(self._holders.pop(id(tables)))

    def leave_window(self, tables: list[list[int]], position: int) -> None:
        """Release nothing: there is no window."""

    def forget(self) -> None:
        """Raise RuntimeError: the weights of a simulation do not change."""
        raise RuntimeError("simulated weights do not change")


SimulatedBlocks = CacheBlocks | CountedBlocks
"""Blocks of a simulated instance: those of the engine, or in less time counts."""


class CountedReservation:
    """`policies.moving_blocks.ReservedBlocks` of a text."""

    def __init__(self, cache: CountedBlocks, digests: Sequence[bytes]) -> None:
        self._cache = cache
        self._digests = digests
        self.first = cache.matching(digests)
        self._holder = Holder(cache.text(digests))

    def __len__(self) -> int:
        return len(self._digests) - self.first

    def fit(self, reserve: float) -> bool:
        """Whether there are so many free blocks, and the fraction `reserve` of all beside them."""
        pool = self._cache.pool
        idle = self._cache.idle_matches(0, self._digests, self.first)
        return pool.free - idle - len(self) >= int(reserve * pool.blocks)

    def take(self) -> None:
        """Take the blocks, and references on the cached prefix."""
        self._cache.pool.share(self._holder, 0, self.first)
        self._cache.pool.take(len(self))
        self._holder.private += len(self)

    def enter(self, index: int, count: int) -> None:
        """Put `count` blocks from `index` on into the prefix cache."""
        self._cache.pool.enter(self._holder, index, index + count)

    def release(self) -> None:
        """Release the blocks; those that were entered stay in the prefix cache."""
        self._cache.pool.release(self._holder)


class CountedUnsent:
    """`policies.moving_blocks.UnsentBlocks` of a text."""

    def __init__(self, cache: CountedBlocks, digests: Sequence[bytes], first: int) -> None:
        self._pool = cache.pool
        self._holder = Holder(cache.text(digests))
        self.next = first
        self._count = 0
        self._end = len(digests)

    def __len__(self) -> int:
        return self._count

    def extend(self) -> int:
        """Hold the blocks that follow, as far as they are cached; returns their number."""
        first = self.next + self._count
        count = self._pool.share_cached(self._holder, first, self._end) - first
        self._count += count
        return count

    def copied(self, count: int) -> None:
        """Release the next `count` blocks."""
        self._pool.release_first(self._holder, self.next, self.next + count)
        self.next = self.next + count
        self._count = self._count - count
