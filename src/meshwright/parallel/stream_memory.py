"""Flags in device memory that a stream writes and waits for, without host or kernel.

They synchronise devices that map each other's memory (CUDA driver API, "Stream Memory Operations").
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_WAIT, _WRITE = 1, 2


def write(word: Tensor, value: int) -> None:
    """Set `word` `(1,)`, int32 on this device, to `value` when the current stream comes to here."""
    _give([_Operation(kind=_WRITE, address=word.data_ptr(), value=value)])


def wait_at_least(words: Sequence[Tensor], value: int) -> None:
    """Make the current stream wait until each of `words` is at least `value`, compared with wrap-around.

    `words` are int32 `(1,)` on this device. Raises RuntimeError, as `write` does, if the driver rejects the call.
    """
    _give([_Operation(kind=_WAIT, address=word.data_ptr(), value=value) for word in words])


class _Operation(ctypes.Structure):
    """One operation on a 32-bit word as the driver lays it out; a wait with no flags is for at least `value`."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


def _give(operations: Sequence[_Operation]) -> None:
    count, stream = len(operations), torch.cuda.current_stream().cuda_stream
    error = _driver().cuStreamBatchMemOp_v2(
        ctypes.c_void_p(stream), ctypes.c_uint(count), (_Operation * count)(*operations), ctypes.c_uint(0)
    )
    if error:
        raise RuntimeError(f"the driver refused a stream memory operation: CUDA error {error}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
