"""Prints lines for people.

Printing never fails, because a closed terminal or pipe must not end a run. This module imports no torch.
"""

from __future__ import annotations

import os
import sys
import textwrap
from contextlib import suppress
from typing import TextIO

HANGING = "    "
"""Further indentation of the continuation lines of a broken line."""


def fitted(text: str, stream: TextIO | None = None) -> str:
    """Return the text, broken between words to the width of the terminal `stream` (by default stderr).

    If the stream is not a terminal, the text is returned unchanged.
    """
    columns = columns_of(stream or sys.stderr)
    return wrapped(text, columns) if columns else text


def columns_of(stream: TextIO) -> int | None:
    """Return the width of the terminal `stream`. None if the stream is not a terminal or is closed."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else None
    except (OSError, ValueError):  # the stream is closed, or has no file descriptor
        return None


def wrapped(text: str, columns: int) -> str:
    """Break lines that are longer than `columns` between words, and indent their continuations. A longer word stays whole."""
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
    """Write one line to `stream` (by default stderr) and flush it. A closed stream is ignored."""
    with suppress(OSError, ValueError):
        print(text, file=stream or sys.stderr, flush=True)
