"""Assignment of requests to rows of the engine's tables: block tables, newest tokens, sampling options."""

from __future__ import annotations

from collections.abc import Container


class RequestRows:
    """Gives rows to requests that run, and takes them back."""

    def __init__(self, table_rows: int) -> None:
        self.row_of: dict[int, int] = {}
        """The row of each request number."""
        self._free = list(range(table_rows - 1, -1, -1))

    def take(self, number: int, needed: Container[int]) -> int:
        """A row for a request without one; if all are taken, that of a request which is not among the `needed` numbers.

        Such a request has lost its cache blocks; it gets another row when it is computed again.
        """
        if not self._free:
            self.release(next(other for other in self.row_of if other not in needed))
        self.row_of[number] = row = self._free.pop()
        return row

    def release(self, number: int) -> int | None:
        """Take back the row of a request; None if it has none."""
        if (row := self.row_of.pop(number, None)) is not None:
            self._free.append(row)
        return row
