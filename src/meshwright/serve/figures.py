"""Numbers that describe the load of an engine. This module does not import PyTorch."""

from __future__ import annotations

from typing import NamedTuple


class EngineFigures(NamedTuple):
    """The load of an engine."""

    running: int = 0
    """Number of requests in the batch."""
    waiting: int = 0
    """Number of requests in the queue."""
    cache_usage: float = 0.0
    """Fraction of the cache blocks that are not free, 0 to 1, in the group of layers where it is largest."""
    preemptions: int = 0
    """Number of times that a running request lost its cache blocks."""
    cached_tokens: int = 0
    """Number of prompt tokens that were taken from the prefix cache, over all admitted requests."""
    draft_tokens: int = 0
    """Number of draft tokens that were checked."""
    accepted_draft_tokens: int = 0
    """Number of draft tokens that were accepted."""
    looked_up_tokens: int = 0
    """Number of prompt tokens of all admitted requests. `cached_tokens / looked_up_tokens` is the hit rate of the prefix cache."""
