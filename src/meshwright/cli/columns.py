"""Formats tables as plain text, for terminals and files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Yield the lines of a table. Two spaces separate the columns. Cells are never shortened.

    `right` has the numbers of the columns that are aligned to the right; the others are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
