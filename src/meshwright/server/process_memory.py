"""Excludes the objects that a process has loaded from garbage collection."""

from __future__ import annotations

import gc


def keep_loaded() -> None:
    """Exclude all current objects from garbage collection.

    The imported packages have so many objects that scanning them takes as long as several engine steps.
    """
    gc.collect()
    gc.freeze()
