"""Compares the tensors of two checkpoints, which may be sharded differently, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from meshwright.checkpoint.format.contents import TensorRecord
from meshwright.checkpoint.read.reader import CheckpointReader

SLICE_BYTES = 32 << 20
"""Bytes of a tensor that are compared at a time."""


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs between checkpoints A and B.

    `max_abs` is the largest absolute difference of two elements, 0 for equal tensors. It is None when only one
    checkpoint has the tensor, when shape or dtype differ, or when a difference is not finite.
    """

    name: str
    status: Literal["equal", "changed", "only_a", "only_b"]
    max_abs: float | None


def compare_checkpoints(a: Path, b: Path) -> Iterator[TensorDifference]:
    """Yield the difference of each tensor of both checkpoints, sorted by name. `equal` means equal bit for bit.

    Raises Damaged if a checkpoint differs from what was written.
    """
    with CheckpointReader(a) as reader_a, CheckpointReader(b) as reader_b:
        for name in sorted(reader_a.tensors.keys() | reader_b.tensors.keys()):
            if name not in reader_b.tensors:
                yield TensorDifference(name, "only_a", None)
            elif name not in reader_a.tensors:
                yield TensorDifference(name, "only_b", None)
            else:
                yield _compare(name, reader_a, reader_b)


def _compare(name: str, a: CheckpointReader, b: CheckpointReader) -> TensorDifference:
    """Compare one tensor that both checkpoints have."""
    record = a.tensors[name]
    if (record.shape, record.dtype) != (b.tensors[name].shape, b.tensors[name].dtype):
        return TensorDifference(name, "changed", None)
    equal = True
    largest = 0.0
    for start, stop in _slices(record):
        rows_a, rows_b = (
            reader.read_rows(name, start, stop) if record.shape else reader.read(name) for reader in (a, b)
        )
        if not torch.equal(_bytes(rows_a), _bytes(rows_b)):
            equal = False
            # NaN counts as the largest difference.
            largest = max(largest, _largest_difference(rows_a, rows_b), key=lambda value: (math.isnan(value), value))
    if equal:
        return TensorDifference(name, "equal", 0.0)
    return TensorDifference(name, "changed", largest if math.isfinite(largest) else None)


def _slices(record: TensorRecord) -> Iterator[tuple[int, int]]:
    """Return ranges [start, stop) of rows, each about `SLICE_BYTES` large."""
    if not record.shape:
        return iter([(0, 0)])
    rows = record.shape[0]
    step = max(1, SLICE_BYTES * rows // max(record.bytes, 1))
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a.to(torch.float64) - b.to(torch.float64)).abs().max())
