"""Tables with a row for each request, which the host changes and the device reads. No change waits for the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional


class MirroredTable:
    """A table `(columns, table_rows)` that the host changes and the device reads, always at the same address."""

    def __init__(self, columns: int, table_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(columns, table_rows, dtype=dtype)
        self.here = self._host if device.type == "cpu" else torch.zeros(columns, table_rows, dtype=dtype, device=device)
        """The table on the device, as of the last copy."""
        self._changed = False

    def set(self, table_row: int, values: Sequence[float]) -> None:
        """Change a row on the host."""
        self._host[:, table_row] = torch.tensor(values, dtype=self._host.dtype)
        self._changed = True

    def copy(self) -> None:
        """Copy changes to the device."""
        if self._changed and self.here is not self._host:
            copy_to_device(self._host, self.here)
        self._changed = False


class WideTable:
    """A list of values for each table row on the device, as wide as the longest list so far."""

    def __init__(self, table_rows: int, dtype: torch.dtype, device: torch.device, *, padding: int) -> None:
        self.values = torch.zeros(table_rows, 0, dtype=dtype, device=device)
        """`(table_rows, width)`; lists end with padding."""
        self.rows: set[int] = set()
        """Table rows of requests that have a list."""
        self._padding = padding
        self._filled: set[int] = set()
        """Table rows that are more than padding."""

    def set(self, table_row: int, values: Collection[float]) -> None:
        """Change a row."""
        self.release(table_row)
        if values:
            self.rows.add(table_row)
        elif table_row not in self._filled:
            return
        width = self.values.shape[1]
        if len(values) > width:
            # Twice as wide, so that few requests make it wider.
            width = max(len(values), 2 * width)
            self.values = functional.pad(self.values, (0, width - self.values.shape[1]), value=self._padding)
        padded = [*values, *[self._padding] * (width - len(values))]
        copy_to_device(torch.tensor(padded, dtype=self.values.dtype), self.values[table_row])
        (self._filled.add if values else self._filled.discard)(table_row)

    def release(self, table_row: int) -> None:
        """Note that the request of a row has ended; its list stays until the next one comes."""
        self.rows.discard(table_row)


def copy_to_device(values: Tensor, target: Tensor) -> None:
    """Copy values of the host to a tensor on the device without waiting for it."""
    # A fresh pinned copy: the next change may come while this one is under way.
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
