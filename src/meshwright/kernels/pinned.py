"""Host memory with locked pages, which a device copies to and from at the full rate of its link and beside compute."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from meshwright.spec.errors import OutOfResources

PAGE = mmap.PAGESIZE


def pinned(owner: object, size: int, holds: str) -> Tensor:
    """`size` bytes that stay, and stay locked, while `owner` lives; `holds` says in an error what they are for.

    Torch's own pinned buffers are rounded up to a power of two, twice as much at worst, and take four times as long. Raises OutOfResources
    when the host's memory cannot be locked.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    # Pages of its own, as none may be locked twice, from the first on: torch asks the runtime about the place where storage begins.
    try:
        pages = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise _too_much(size, holds) from None
    with suppress(OSError):  # a kernel may have none
        pages.madvise(mmap.MADV_HUGEPAGE)
    line = torch.frombuffer(pages, dtype=torch.uint8)
    line.zero_()  # by all threads of the rank: to lock pages that are not there yet takes one thread many times as long
    _lock(owner, line, holds)
    return line[:size]


def _lock(owner: object, line: Tensor, holds: str) -> None:
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(line.data_ptr(), line.nbytes, 1)):  # for all devices of the process, as torch does
        raise _too_much(line.nbytes, holds)
    # It keeps the line: pages must not become another's while they are locked.
    let_go: Any = weakref.finalize(owner, _unlock, runtime, line)
    let_go.atexit = False  # with the process its pages go anyway, and the runtime may be gone before


def _unlock(runtime: Any, line: Tensor) -> None:
    runtime.cudaHostUnregister(line.data_ptr())


def _too_much(size: int, holds: str) -> OutOfResources:
    return OutOfResources(
        f"{size / 2**30:.1f} GiB of host memory could not be pinned for {holds} of one rank (plan.offload); offload fewer layers "
        "(plan.layers), use more ranks, or raise the host's limit of locked memory (ulimit -l)"
    )
