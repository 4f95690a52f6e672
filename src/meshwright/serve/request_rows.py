"""Assignment of requests to table rows. A row of the engine's tables has the block table, newest token and options of one request."""

from __future__ import annotations

from collections.abc import Container


class RequestRows:
    """Gives table rows to running requests."""

    def __init__(self, table_rows: int) -> None:
        self.row_of: dict[int, int] = {}
        """The table row of each request, by request number."""
        self._free = list(range(table_rows - 1, -1, -1))

    def take(self, number: int, needed: Container[int]) -> int:
        """Give a row to request `number`, which has none, and return the row.

        If no row is free, it takes the row of a request that is not in `needed`. Such a request has lost its cache blocks, and gets another
        row when it is computed again.
        """
        if not self._free:
            self.release(next(other for other in self.row_of if other not in needed))
        self.row_of[number] = row = self._free.pop()
        return row

    def release(self, number: int) -> int | None:
        """Free the row of a request. Returns the row, or None if the request has none."""
        if (row := self.row_of.pop(number, None)) is not None:
            self._free.append(row)
        return row
