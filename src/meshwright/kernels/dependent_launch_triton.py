"""Dependent launch of kernels that follow one another in a decode: one is on the device when the one before ends.

Between two kernels of a stream an H200 takes about a microsecond, a third of what many kernels of a decode take. A kernel launched with
`options` is placed on the multiprocessors as soon as all programs of the kernel before have begun to compute, or ended. `await_previous`
waits until that kernel has ended: it is called before a kernel writes or reads what other kernels write. Weights, which no kernel of a
step writes, may be read before, or be brought into the L2 cache by `prefetch`, so that the memory is not idle meanwhile. (CUDA:
programmatic dependent launch.)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FIRST_CAPABILITY = (9, 0)
"""Hopper."""
MOST_ARRIVALS = 1 << 16
"""Sums whose parts have programs of their own, in one kernel."""


def options(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch on `device` for a kernel that calls `await_previous` with DEPENDENT."""
    return {"DEPENDENT": True, "launch_pdl": True} if is_supported(device) else {"DEPENDENT": False}


@cache
def is_supported(device: torch.device) -> bool:
    """Whether kernels on `device` are launched so."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


@cache
def arrivals(device: torch.device) -> Tensor:
    """Zeros in which the programs that share a sum count their arrivals; every kernel leaves zeros. Not for several streams at a time."""
    return torch.zeros(MOST_ARRIVALS, dtype=torch.int32, device=device)


@triton.jit
def await_previous(DEPENDENT: tl.constexpr) -> None:
    """Wait until the kernel before has ended, and let the next one be placed."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, DEPENDENT: tl.constexpr) -> None:
    """Bring the cache lines of `pointers` into the L2 cache. The memory may still change: they are loaded later."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.uint64, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
