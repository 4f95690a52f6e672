"""Lines for people that cannot fail: a closed terminal or pipe must not end a run. Torch-free."""

from __future__ import annotations

import os
import sys
import textwrap
from contextlib import suppress
from typing import TextIO

HANGING = "    "
"""What the rest of a broken line is indented by, more than its begin."""


def fitted(text: str, stream: TextIO | None = None) -> str:
    """Returns the text, broken between words at the width of the terminal that `stream` (stderr when None) is; for a file as it is."""
    columns = columns_of(stream or sys.stderr)
    return wrapped(text, columns) if columns else text


def columns_of(stream: TextIO) -> int | None:
    """The width of the terminal that `stream` is; None for a file or a closed stream."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else None
    except (OSError, ValueError):  # closed, or without a descriptor
        return None


def wrapped(text: str, columns: int) -> str:
    """Breaks lines longer than `columns` between words, and indents what follows. A word that is longer stays whole."""
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())] + HANGING
        pieces = textwrap.wrap(
            line,
            columns,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        lines += pieces if len(line) > columns else [line]
    return "\n".join(lines)


def write_line(text: str, stream: TextIO | None = None) -> None:
    """Write one line to `stream` (stderr when None) and flush it; a closed stream is ignored."""
    with suppress(OSError, ValueError):
        print(text, file=stream or sys.stderr, flush=True)
