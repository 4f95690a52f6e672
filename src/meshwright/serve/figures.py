"""The load of an engine, in figures. Torch-free."""

from __future__ import annotations

from typing import NamedTuple


class EngineFigures(NamedTuple):
    """The load of an engine."""

    running: int = 0
    """Requests in the batch."""
    waiting: int = 0
    """Requests in the queue."""
    cache_usage: float = 0.0
    """Share of the cache's blocks that requests hold, 0 to 1; of several groups the largest."""
    preemptions: int = 0
    """Times that a request lost its blocks."""
    cached_tokens: int = 0
    """Tokens of admitted prompts that were taken from the prefix cache."""
    draft_tokens: int = 0
    """Draft tokens that steps have checked."""
    accepted_draft_tokens: int = 0
    """Draft tokens that were accepted."""
    looked_up_tokens: int = 0
    """Tokens of admitted prompts."""
