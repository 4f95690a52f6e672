"""Changes of cache blocks outside of steps. They are recorded on one rank, so that the other ranks of its engine repeat them.

Ranks plan equal steps only if their block pools are equal. Within steps, every rank makes the same changes by itself. Transfers between
engines (`policies.moving_blocks`) happen on rank 0 only, so their changes must be sent to the other ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from meshwright.policies.cache_blocks import BlockPool, CacheBlocks

Change = Sequence[Any]
"""A recorded change: number of the group, name of a method of `BlockPool`, and its arguments as values of JSON."""


class RecordedPool(BlockPool):
    """A second object with the state of another pool. Changes through this object are recorded; changes through the other are not."""

    __slots__ = ("_record",)

    def __init__(self, pool: BlockPool, record: Callable[..., None]) -> None:
        self.__dict__ = pool.__dict__
        self._record = record

    def take_all(self, count: int) -> list[int]:
        blocks = super().take_all(count)
        self._record("take_all", count)
        return blocks

    def share_all(self, blocks: Iterable[int]) -> None:
        shared = list(blocks)
        super().share_all(shared)
        self._record("share_all", shared)

    def release_all(self, blocks: Iterable[int]) -> None:
        released = list(blocks)
        super().release_all(released)
        self._record("release_all", released)

    def register_all(self, blocks: Iterable[int], digests: Iterable[bytes]) -> None:
        registered = list(blocks)
        names = list(digests)
        super().register_all(registered, names)
        self._record("register_all", registered, [name.hex() for name in names])


def recorded_blocks(cache: CacheBlocks, record: Callable[[Change], None]) -> CacheBlocks:
    """A copy of `cache` that has the same blocks. `record` is called with each change that is made through the copy."""

    def note(group: int, name: str, first: Any, *others: Any) -> None:
        if first:  # a change of no blocks needs no message
            record([group, name, first, *others])

    recorded = copy.copy(cache)
    recorded.pools = [RecordedPool(pool, partial(note, group)) for group, pool in enumerate(cache.pools)]
    return recorded


def repeat_change(cache: CacheBlocks, change: Change) -> None:
    """Make a recorded change in the pools of another rank. The pools must have been equal to the recording rank's before the change."""
    group, name, *arguments = change
    pool = cache.pools[group]
    if name == "take_all":
        pool.take_all(*arguments)
    elif name == "share_all":
        pool.share_all(*arguments)
    elif name == "release_all":
        pool.release_all(*arguments)
    else:
        blocks, digests = arguments
        pool.register_all(blocks, map(bytes.fromhex, digests))
