"""Changes of cache blocks outside of steps, recorded on one rank so that the other ranks of its engine repeat them.

Ranks plan equal steps only if their pools are equal. Within steps all ranks change them alike; what moves blocks between engines
(`policies.moving_blocks`) runs on one rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from meshwright.policies.cache_blocks import BlockPool, CacheBlocks

Change = Sequence[Any]
"""Group, name of a method of `BlockPool`, and its arguments in values of JSON."""


class RecordedPool(BlockPool):
    """The state of another pool: a change through this object is also recorded."""

    __slots__ = ("_record",)

    def __init__(self, pool: BlockPool, record: Callable[..., None]) -> None:
        self.__dict__ = pool.__dict__
        self._record = record

    def take(self) -> int:
        block = super().take()
        self._record("take")
        return block

    def share(self, block: int) -> None:
        super().share(block)
        self._record("share", block)

    def release(self, block: int) -> None:
        super().release(block)
        self._record("release", block)

    def register(self, block: int, digest: bytes) -> None:
        super().register(block, digest)
        self._record("register", block, digest.hex())


def recorded_blocks(cache: CacheBlocks, record: Callable[[Change], None]) -> CacheBlocks:
    """The same blocks; `record` gets each change that is made through the returned object."""

    def note(group: int, *change: Any) -> None:
        record([group, *change])

    recorded = copy.copy(cache)
    recorded.pools = [RecordedPool(pool, partial(note, group)) for group, pool in enumerate(cache.pools)]
    return recorded


def repeat_change(cache: CacheBlocks, change: Change) -> None:
    """Make a recorded change in the pools of another rank, which were equal before it."""
    group, name, *arguments = change
    pool = cache.pools[group]
    if name == "take":
        pool.take()
    elif name == "share":
        pool.share(*arguments)
    elif name == "release":
        pool.release(*arguments)
    else:
        block, digest = arguments
        pool.register(block, bytes.fromhex(digest))
