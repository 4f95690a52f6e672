"""Keeps what a process has loaded out of the garbage collector."""

from __future__ import annotations

import gc


def keep_loaded() -> None:
    """Let the garbage collector skip all objects of now: a look at those of large packages takes as long as several steps."""
    gc.collect()
    gc.freeze()
