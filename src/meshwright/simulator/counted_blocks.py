"""A faster substitute for the engine's `CacheBlocks` in simulations of models without attention windows.

It counts blocks instead of naming them; the counts are those of `CacheBlocks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.policies.cache_blocks import BlockTables, CacheBlocks
from meshwright.simulator.cache_extents import ExtentPool, Holder
from meshwright.simulator.text_pieces import Text


class CountedBlocks(BlockTables):
    """`BlockTables` of one group of layers without a window, where only the length of a block table has a meaning: all entries are 1.

    A "digest" is here the name of a sequence in `texts`, the same for each of its blocks. Where the block counts that the prompt fills
    in part, the last digest is the name of the prompt (`TextPieces.texts` gives both sequences).
    """

    alike = True

    def __init__(self, blocks: int, tokens_per_block: int, texts: Mapping[bytes, Text]) -> None:
        self.pool = ExtentPool(blocks)
        super().__init__([self.pool], [None], tokens_per_block)
        self.texts = texts
        """The pieces of each sequence, by its name. The caller adds and removes entries."""
        self._holders: dict[int, Holder] = {}
        """By `id` of a request's block tables, the holder of its references."""

    def text(self, digests: Sequence[bytes]) -> Text:
        """Return the pieces of the sequence that the last digest names; none without digests."""
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
"""The cache of a simulated instance: the engine's own blocks, or their counts, which are faster (`serve_simulation.can_count`)."""


class CountedReservation:
    """Counts in place of `policies.moving_blocks.ReservedBlocks`: blocks that a decode instance reserves for a prompt.

    `first` is the number of blocks at the beginning of the prompt that are cached already; the others are reserved.
    """

    def __init__(self, cache: CountedBlocks, digests: Sequence[bytes]) -> None:
        self._cache = cache
        self._digests = digests
        self.first = cache.matching(digests)
        self._holder = Holder(cache.text(digests))

    def __len__(self) -> int:
        return len(self._digests) - self.first

    def fit(self, reserve: float) -> bool:
        """Whether the blocks can be reserved so that the fraction `reserve` of all blocks is still free afterwards."""
        pool = self._cache.pool
        idle = self._cache.idle_matches(0, self._digests, self.first)
        return pool.free - idle - len(self) >= int(reserve * pool.blocks)

    def take(self) -> None:
        """Reserve the blocks that are not cached, and add references to the cached ones before them."""
        self._cache.pool.share(self._holder, 0, self.first)
        self._cache.pool.take(len(self))
        self._holder.private += len(self)

    def enter(self, index: int, count: int) -> None:
        """Put `count` blocks of the prompt, from block `index` on, into the prefix cache: their content has arrived."""
        self._cache.pool.enter(self._holder, index, index + count)

    def release(self) -> None:
        """Remove all references. Blocks that `enter` has put into the prefix cache stay there."""
        self._cache.pool.release(self._holder)


class CountedUnsent:
    """Counts in place of `policies.moving_blocks.UnsentBlocks`: computed blocks that a prefill instance holds until they are copied.

    `next` is the first block that is not copied yet; the length is the number of blocks that are held.
    """

    def __init__(self, cache: CountedBlocks, digests: Sequence[bytes], first: int) -> None:
        self._pool = cache.pool
        self._holder = Holder(cache.text(digests))
        self.next = first
        self._count = 0
        self._end = len(digests)

    def __len__(self) -> int:
        return self._count

    def extend(self) -> int:
        """Hold the cached blocks that follow those held already, up to the first block that is not cached. Returns how many were added."""
        first = self.next + self._count
        count = self._pool.share_cached(self._holder, first, self._end) - first
        self._count += count
        return count

    def copied(self, count: int) -> None:
        """Release the first `count` of the held blocks: they have been copied."""
        self._pool.release_first(self._holder, self.next, self.next + count)
        self.next = self.next + count
        self._count = self._count - count
