"""Formats tables as plain text, for terminals and files."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence

NARROWEST = 10
"""Fewest characters of a last column that is broken."""


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), columns: int | None = None) -> Iterator[str]:
    """Yield the lines of a table. Two spaces separate the columns. Cells are never shortened.

    `right` has the numbers of the columns that are aligned to the right; the others are aligned to the left.
    With `columns`, the width of a terminal, cells of the last column are broken between words and continue below their beginning.

    >>> list(aligned([("name", "plan"), ("tiny", "FSDP 8 (ZeRO-2 and 3)")], columns=20))
    ['name  plan', 'tiny  FSDP 8 (ZeRO-2', '      and 3)']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    before = sum(widths[:-1]) + 2 * len(widths[:-1])
    last = max(NARROWEST, columns - before) if columns else max(widths[-1], 1)
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row[:-1], widths[:-1], strict=True))
        ]
        cell = row[-1].rjust(widths[-1]) if len(widths) - 1 in right else row[-1]
        first, *more = textwrap.wrap(cell, last, break_long_words=False, drop_whitespace=columns is not None) or [""]
        yield "  ".join([*cells, first]).rstrip()
        yield from (" " * before + text for text in more)
