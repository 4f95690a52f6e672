"""Dependent launch: a kernel is already on the GPU when the previous kernel ends (CUDA: programmatic dependent launch).

On an H200 about a microsecond passes between two kernels of a stream. Many kernels of a decode take only three
microseconds. A kernel launched with `options` is placed on the multiprocessors as soon as all programs of the previous
kernel have called `await_previous` or have ended.

Such a kernel must call `await_previous`, which waits until the previous kernel has ended, before it reads or writes
memory that other kernels write. Weights are not written by any kernel of a step. So a kernel may read weights before it
waits, or load them into the L2 cache with `prefetch`, and the memory is not idle meanwhile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FIRST_CAPABILITY = (9, 0)
"""Least CUDA compute capability with dependent launch: Hopper."""
MOST_ARRIVALS = 1 << 16
"""Length of the `arrivals` buffer: the most result tiles of one kernel whose parts are computed by programs of their own."""


def options(device: torch.device) -> dict[str, Any]:
    """Return the launch arguments on `device` for a kernel that calls `await_previous(DEPENDENT)`."""
    return {"DEPENDENT": True, "launch_pdl": True} if is_supported(device) else {"DEPENDENT": False}


@cache
def is_supported(device: torch.device) -> bool:
    """Return whether `device` supports dependent launch."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


@cache
def arrivals(device: torch.device) -> Tensor:
    """Return a buffer of int32 counters `(MOST_ARRIVALS,)`, one per result tile, all 0.

    The programs that compute parts of one tile count their arrivals in it. Every kernel leaves zeros. All kernels of a
    device share this buffer, so kernels on two streams must not use it at the same time.
    """
    return torch.zeros(MOST_ARRIVALS, dtype=torch.int32, device=device)


@triton.jit
def await_previous(DEPENDENT: tl.constexpr) -> None:
    """Wait until the previous kernel of the stream has ended, and allow the next kernel to be placed."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, DEPENDENT: tl.constexpr) -> None:
    """Load the cache lines of `pointers` into the L2 cache. The caller must still load the numbers later."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.uint64, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
