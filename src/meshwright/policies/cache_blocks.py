"""Blocks of the paged key-value cache: reference counts, the prefix cache, and one block table for each group of layers.

Equal prefixes are found by a chain of hashes over full blocks. The digest of a block is BLAKE2b of its parent's digest and its token ids.
The first block's parent is a root digest that depends on the salt. Digests have 256 bits, so equal digests are taken to mean equal
prefixes, and tokens are not compared.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from meshwright.policies.batch_request import CacheGroup

NO_SALT = "="
"""Prefix of every salt. Requests without a salt of their own have only this, and share their blocks."""
UNUSED_BLOCK = 0
"""Id that a table has in place of a block that is outside the window. No request ever gets this block."""


def root_digest(salt: str, generation: int) -> bytes:
    """The parent digest of first blocks, for a salt and a generation of the weights."""
    name = salt.encode("utf-8", "surrogatepass")  # any text of JSON; different texts have different bytes
    return hashlib.blake2b(name + generation.to_bytes(8, "little"), digest_size=32).digest()


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of a block. `parent` is the digest of the block before it, or the root."""
    return hashlib.blake2b(parent + array("I", tokens).tobytes(), digest_size=32).digest()


def extend_digests(digests: list[bytes], root: bytes, tokens: Sequence[int], blocks: int, size: int) -> None:
    """Append the missing digests of the first `blocks` full blocks of `size` tokens to `digests`."""
    parent = digests[-1] if digests else root
    for start in range(len(digests) * size, blocks * size, size):
        parent = block_digest(parent, tokens[start : start + size])
        digests.append(parent)


class BlockCounts:
    """How many blocks of one group there are and how many are free."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks - 1
        """Blocks that requests can get: all except `UNUSED_BLOCK`."""
        self.free = self.blocks
        """Blocks without references."""
        self.releases = 0
        """How often references were removed. A request that found too few free blocks is tried again when this number has changed."""


class BlockPool(BlockCounts):
    """The blocks of one group. A block without references stays in the prefix cache until it is needed, least recently used first.

    Example: of 4 blocks, block 0 is never used. After two are taken, one is free:
    >>> pool = BlockPool(4)
    >>> pool.take_all(2), pool.free
    ([1, 2], 1)
    """

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.references = [0] * blocks
        self.block_of: dict[bytes, int] = {}
        """Cached blocks by digest."""
        self._digest_of: dict[int, bytes] = {}
        self._empty = list(range(blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks without references, the least recently used first."""

    @property
    def cached(self) -> int:
        """Cached blocks without references."""
        return len(self._idle)

    def take(self) -> int:
        """Take a free block, with one reference. Blocks outside the prefix cache are taken first. Raises IndexError if none is free."""
        return self.take_all(1)[0]

    def take_all(self, count: int) -> list[int]:
        """Take `count` free blocks, with one reference each. Blocks outside the prefix cache are taken first. Raises IndexError."""
        if count > self.free:
            raise IndexError("no free cache block")
        empty = self._empty
        references = self.references
        kept = max(0, len(empty) - count)
        taken = empty[kept:][::-1]
        del empty[kept:]
        for _ in range(count - len(taken)):
            block, _ = self._idle.popitem(last=False)
            del self.block_of[self._digest_of.pop(block)]
            taken.append(block)
        for block in taken:
            references[block] = 1
        self.free -= count
        return taken

    def share_all(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these cached blocks."""
        references = self.references
        for block in blocks:
            if not references[block]:
                del self._idle[block]
                self.free -= 1
            references[block] += 1

    def release_all(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each block, in this order. `UNUSED_BLOCK` is skipped."""
        references = self.references
        digest_of = self._digest_of
        idle = self._idle
        empty = self._empty
        before = len(idle) + len(empty)
        self.releases += 1
        for block in blocks:
            if block == UNUSED_BLOCK:
                continue
            references[block] = others = references[block] - 1
            if others:
                continue
            if block in digest_of:
                idle[block] = None
            else:
                empty.append(block)
        self.free += len(idle) + len(empty) - before

    def claim(self, digest: bytes) -> int:
        """Remove the cached block with this digest from the prefix cache, and return it with one reference. It must have had none."""
        block = self.block_of.pop(digest)
        del self._digest_of[block], self._idle[block]
        self.references[block] = 1
        self.free -= 1
        return block

    def idle_of(self, digests: Iterable[bytes]) -> int:
        """The number of these digests whose cached block has no references. All must be cached."""
        references = self.references
        block_of = self.block_of
        return sum([not references[block_of[digest]] for digest in digests])

    def register_all(self, blocks: Iterable[int], digests: Iterable[bytes]) -> None:
        """Enter computed blocks into the prefix cache, except `UNUSED_BLOCK` and blocks with an equal one in the cache."""
        block_of = self.block_of
        digest_of = self._digest_of
        for block, digest in zip(blocks, digests, strict=True):
            if block != UNUSED_BLOCK and digest not in block_of and block not in digest_of:
                block_of[digest] = block
                digest_of[block] = digest

    def remove(self, blocks: Iterable[int], digests: Iterable[bytes]) -> None:
        """Remove from the prefix cache these blocks, and also the blocks with these digests. Those that are not cached are ignored."""
        known = {self.block_of[digest] for digest in digests if digest in self.block_of}
        for block in known.union(block for block in blocks if block in self._digest_of):
            del self.block_of[self._digest_of.pop(block)]
            if block in self._idle:
                del self._idle[block]
                self._empty.append(block)

    def forget(self) -> None:
        """Empty the prefix cache. References stay."""
        self._empty.extend(self._idle)
        self._idle.clear()
        self.block_of.clear()
        self._digest_of.clear()


class BlockTables(ABC):
    """The interface through which batching gets blocks. `tables` always means the block tables of one request, one for each group."""

    alike = False
    """Whether blocks are only counted, so that it does not matter in which order requests take them."""

    def __init__(self, counts: Sequence[BlockCounts], windows: Sequence[int | None], tokens_per_block: int) -> None:
        self.counts = counts
        """Block counts of each group."""
        self.windows = windows
        """For each group, the tokens that a query attends to; None for all."""
        self.tokens_per_block = tokens_per_block
        self.smallest_window = min((window for window in windows if window is not None), default=None)

    def first_block(self, group: int, position: int) -> int:
        """Index of the first block in which a query at `position` attends to a token."""
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self.tokens_per_block

    def blocks_outside(self, position: int) -> int:
        """Number of leading blocks that some group no longer needs for a query at `position`."""
        return max(self.first_block(group, position) for group in range(len(self.windows)))

    def most_held(self, group: int, tokens: int, chunk: int = 1) -> int:
        """The most blocks of a group that a request of `tokens` tokens has at any time, if it is computed `chunk` tokens at a time."""
        size = self.tokens_per_block
        window = self.windows[group]
        whole = -(-tokens // size)
        return whole if window is None else min(whole, -(-(window + chunk - 2) // size) + 1)

    def room(self, tables: list[list[int]]) -> int:
        """Number of positions that `tables` can cover if they get all free blocks."""
        blocks = min([len(table) + pool.free for pool, table in zip(self.counts, tables, strict=True)])
        return blocks * self.tokens_per_block

    @abstractmethod
    def matching(self, digests: Sequence[bytes]) -> int:
        """The longest usable cached prefix, in blocks: after it, every group has all blocks that the next token attends to."""

    @abstractmethod
    def idle_matches(self, group: int, digests: Sequence[bytes], length: int) -> int:
        """How many cached blocks of a matching prefix of `length` blocks are counted as free, as they have no references."""

    @abstractmethod
    def share(self, tables: list[list[int]], digests: Sequence[bytes], length: int) -> None:
        """Fill the empty `tables` with a matching prefix of `length` blocks, and add references to its blocks."""

    @abstractmethod
    def claim(self, tables: list[list[int]], digest: bytes) -> bool:
        """Append the cached block with this digest to each table and remove it from the prefix cache, so that the request may write to it.

        Returns False, without changes, if in any group the block is not cached or has references.
        """

    @abstractmethod
    def append(self, tables: list[list[int]]) -> bool:
        """Append a free block to each table. Returns False, without changes, if a group has none."""

    @abstractmethod
    def append_all(self, wanted: Sequence[tuple[list[list[int]], int]]) -> None:
        """For each (tables, number): append this number of free blocks to each table. Raises IndexError if too few are free."""

    @abstractmethod
    def grow(self, tables: list[list[int]], tokens: int) -> None:
        """Append blocks until `tables` cover `tokens` positions. Check with `room` before that there are enough."""

    @abstractmethod
    def leave_window(self, tables: list[list[int]], position: int) -> None:
        """Release the blocks to which no query from `position` on attends."""

    @abstractmethod
    def register(self, tables: list[list[int]], digests: Sequence[bytes], first: int, last: int) -> None:
        """Enter the computed blocks `first` … `last - 1` into the prefix cache."""

    @abstractmethod
    def remove(self, tables: list[list[int]], digests: Sequence[bytes]) -> None:
        """Remove the blocks of `tables`, and the blocks with these digests, from the prefix cache. Their references stay."""

    @abstractmethod
    def release(self, tables: list[list[int]]) -> None:
        """Release all blocks, the last one first. Cached prefixes are then evicted from their end."""

    @abstractmethod
    def forget(self) -> None:
        """Empty the prefix cache, because the weights have changed."""


class CacheBlocks(BlockTables):
    """The block tables of an engine, with one `BlockPool` for each group."""

    def __init__(self, groups: Sequence[CacheGroup], tokens_per_block: int) -> None:
        self.pools = [BlockPool(group.blocks) for group in groups]
        super().__init__(self.pools, [group.window for group in groups], tokens_per_block)

    def matching(self, digests: Sequence[bytes]) -> int:
        longest = 0
        consecutive = [0] * len(self.pools)
        if None in self.windows:  # such a group needs every block of the prefix
            pool = self.pools[self.windows.index(None)]
            digests = list(takewhile(pool.block_of.__contains__, digests))
            if len(self.pools) == 1:
                return len(digests)
        for index, digest in enumerate(digests):
            needed = (index + 1) * self.tokens_per_block
            usable = True
            for group, pool in enumerate(self.pools):
                consecutive[group] = consecutive[group] + 1 if digest in pool.block_of else 0
                usable = usable and consecutive[group] >= index + 1 - self.first_block(group, needed)
            if usable:
                longest = index + 1
        return longest

    def idle_matches(self, group: int, digests: Sequence[bytes], length: int) -> int:
        first = self.first_block(group, length * self.tokens_per_block)
        return self.pools[group].idle_of(digests[first:length])

    def has_any(self, digests: Sequence[bytes], first: int, end: int) -> bool:
        """Whether any group has cached any of the blocks `first` … `end - 1` with these digests."""
        return any(digest in pool.block_of for pool in self.pools for digest in digests[first:end])

    def share(self, tables: list[list[int]], digests: Sequence[bytes], length: int) -> None:
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            first = self.first_block(group, length * self.tokens_per_block)
            table.extend([UNUSED_BLOCK] * first)
            blocks = [pool.block_of[digest] for digest in digests[first:length]]
            pool.share_all(blocks)
            table.extend(blocks)

    def claim(self, tables: list[list[int]], digest: bytes) -> bool:
        if not all(digest in pool.block_of and pool.idle_of((digest,)) for pool in self.pools):
            return False
        for pool, table in zip(self.pools, tables, strict=True):
            table.append(pool.claim(digest))
        return True

    def append(self, tables: list[list[int]]) -> bool:
        for pool in self.pools:
            if not pool.free:
                return False
        for pool, table in zip(self.pools, tables, strict=True):
            table.append(pool.take())
        return True

    def append_all(self, wanted: Sequence[tuple[list[list[int]], int]]) -> None:
        for tables, more in wanted:
            for pool, table in zip(self.pools, tables, strict=True):
                table.extend(pool.take_all(more))

    def grow(self, tables: list[list[int]], tokens: int) -> None:
        blocks = -(-tokens // self.tokens_per_block)
        for pool, table in zip(self.pools, tables, strict=True):
            table.extend(pool.take_all(max(0, blocks - len(table))))

    def leave_window(self, tables: list[list[int]], position: int) -> None:
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            for index in range(self.first_block(group, position) - 1, -1, -1):
                if table[index] == UNUSED_BLOCK:
                    break
                pool.release_all((table[index],))
                table[index] = UNUSED_BLOCK

    def register(self, tables: list[list[int]], digests: Sequence[bytes], first: int, last: int) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.register_all(table[first:last], digests[first:last])

    def remove(self, tables: list[list[int]], digests: Sequence[bytes]) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.remove(table, digests)

    def release(self, tables: list[list[int]]) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.release_all(reversed(table))

    def forget(self) -> None:
        for pool in self.pools:
            pool.forget()
