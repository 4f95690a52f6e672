"""Tables with a row for each request, which the host writes and the device reads. The host never waits for the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional


class MirroredTable:
    """A table `(columns, table_rows)` of fixed size: the host writes rows, and `copy` copies the table to the same memory of the device."""

    def __init__(self, columns: int, table_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(columns, table_rows, dtype=dtype)
        self.here = self._host if device.type == "cpu" else torch.zeros(columns, table_rows, dtype=dtype, device=device)
        """The table on the device, with the values of the last call of `copy`."""
        self._changed = False

    def set(self, table_row: int, values: Sequence[float]) -> None:
        """Set the values of a row on the host. The next call of `copy` copies them to the device."""
        self._host[:, table_row] = torch.tensor(values, dtype=self._host.dtype)
        self._changed = True

    def copy(self) -> None:
        """Copy the table to the device if a row has changed since the last copy."""
        if self._changed and self.here is not self._host:
            copy_to_device(self._host, self.here)
        self._changed = False


class WideTable:
    """A table on the device with a list of values for each table row. The table grows with the longest list."""

    def __init__(self, table_rows: int, dtype: torch.dtype, device: torch.device, *, padding: int) -> None:
        self.values = torch.zeros(table_rows, 0, dtype=dtype, device=device)
        """`(table_rows, width)`: the list of each row, then padding."""
        self.rows: set[int] = set()
        """Table rows whose request has a list that is not empty."""
        self._padding = padding
        self._filled: set[int] = set()
        """Table rows that have values other than padding. The request of such a row may have ended."""

    def set(self, table_row: int, values: Collection[float]) -> None:
        """Set the list of a row."""
        self.release(table_row)
        if values:
            self.rows.add(table_row)
        elif table_row not in self._filled:
            return
        width = self.values.shape[1]
        if len(values) > width:
            # At least twice as wide as before, so that the table seldom grows.
            width = max(len(values), 2 * width)
            self.values = functional.pad(self.values, (0, width - self.values.shape[1]), value=self._padding)
        padded = [*values, *[self._padding] * (width - len(values))]
        copy_to_device(torch.tensor(padded, dtype=self.values.dtype), self.values[table_row])
        (self._filled.add if values else self._filled.discard)(table_row)

    def release(self, table_row: int) -> None:
        """Note that the request of a row has ended. Its list stays on the device until the row is set again."""
        self.rows.discard(table_row)


def copy_to_device(values: Tensor, target: Tensor) -> None:
    """Copy `values`, on the host, to `target` on the device, without waiting for the device."""
    # The copy reads from a new pinned tensor, because the caller may change `values` before the copy has run.
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
