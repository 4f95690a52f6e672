"""Stream operations that write a flag in device memory, or wait for a flag, without the host and without a kernel.

They synchronise devices that map each other's memory (CUDA driver API, "Stream Memory Operations").
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_WAIT = 1
_WRITE = 2


def write(word: Tensor, value: int) -> None:
    """Make the current stream set `word`, one int32 `(1,)` on this device, to `value`. Raises RuntimeError if the driver refuses."""
    _launch([_Operation(operation=_WRITE, address=word.data_ptr(), value=value)])


def wait_at_least(words: Sequence[Tensor], value: int) -> None:
    """Make the current stream wait until each of `words` is at least `value`. The comparison wraps around at 2³².

    Each word is one int32 `(1,)` on this device. Raises RuntimeError if the driver refuses.
    """
    _launch([_Operation(operation=_WAIT, address=word.data_ptr(), value=value) for word in words])


class _Operation(ctypes.Structure):
    """The driver's struct for one operation on a 32-bit word. With `flags` 0 a wait ends when the word is at least `value`."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


def _launch(operations: Sequence[_Operation]) -> None:
    count = len(operations)
    stream = torch.cuda.current_stream().cuda_stream
    error = _driver().cuStreamBatchMemOp_v2(
        ctypes.c_void_p(stream), ctypes.c_uint(count), (_Operation * count)(*operations), ctypes.c_uint(0)
    )
    if error:
        raise RuntimeError(f"the driver refused a stream memory operation: CUDA error {error}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
