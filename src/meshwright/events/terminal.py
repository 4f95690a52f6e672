"""Lines for people that cannot fail: a closed terminal or pipe must not end a run. Torch-free."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO


def write_line(text: str, stream: TextIO | None = None) -> None:
    """Write one line to `stream` (stderr when None) and flush it; a closed stream is ignored."""
    with suppress(OSError, ValueError):
        print(text, file=stream or sys.stderr, flush=True)
