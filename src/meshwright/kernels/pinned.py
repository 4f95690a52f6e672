"""Pinned (page-locked) host memory. Copies to and from it run at the full rate of the link and overlap with compute."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from meshwright.spec.errors import OutOfResources

PAGE = mmap.PAGESIZE
PIN_BYTES = 256 << 20
"""Size in bytes of the parts in which a thread pins memory while training runs.

The CUDA driver is locked while a part is pinned. Between two parts the main thread can call it. A single copy must not
read or write two parts; see `slices_within_parts`.
"""


def allocate_pinned(owner: object, size: int, purpose: str, *, in_parts: bool = False) -> Tensor:
    """Return `size` zero bytes of pinned host memory. It is unpinned when `owner` is garbage-collected.

    With `in_parts` the memory is pinned in parts of `PIN_BYTES`; use this in a thread while training runs.

    torch's own pinned buffers are rounded up to a power of two (at worst twice the bytes), and their allocation takes four
    times as long. Raises OutOfResources, which names the `purpose`, when host memory cannot be pinned.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    # The buffer has its own pages, because no page may be pinned twice. It begins at a page, because torch asks the CUDA
    # runtime by a buffer's first address whether it is pinned.
    try:
        pages = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise _pinning_error(size, purpose) from None
    with suppress(OSError):  # the kernel may lack huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    # This allocates the pages with all threads of the rank; cudaHostRegister would do it with one thread, much more slowly.
    buffer.zero_()
    parts = buffer.split(PIN_BYTES) if in_parts else (buffer,)
    for part in parts:
        if not pin_pages(owner, part):
            raise _pinning_error(part.nbytes, purpose)
    return buffer[:size]


def pin_pages(owner: object, pages: Tensor) -> bool:
    """Pin the pages of a byte tensor until `owner` is garbage-collected. Return False if the driver refuses.

    `pages` must begin at a page and consist of whole pages of host memory. They stay mapped as long as they are pinned.
    If pinned pages were unmapped, the driver would still take their addresses for pinned memory. The next buffer
    at these addresses would then be copied to and from the old pages: wrong contents without an error.
    """
    runtime: Any = torch.cuda.cudart()
    if int(
        runtime.cudaHostRegister(pages.data_ptr(), pages.nbytes, 1)
    ):  # 1: pinned for all devices of the process, as in torch
        return False
    # The finalizer refers to the tensor, which keeps the pages mapped.
    finalizer: Any = weakref.finalize(owner, _unpin, runtime, pages)
    finalizer.atexit = False  # the end of the process frees the pages, and the CUDA runtime may have ended before
    return True


def _unpin(runtime: Any, pages: Tensor) -> None:
    """Unpin the pages of a tensor. `pages` is an argument so that the pages stay mapped until then."""
    runtime.cudaHostUnregister(pages.data_ptr())


def slices_within_parts(start: int, count: int) -> Iterator[slice]:
    """Divide `count` bytes from byte `start` of pinned memory on, so that no slice is in two parts of `PIN_BYTES`.

    Yields slices of range(count), relative to `start`.
    """
    done = 0
    while done < count:
        end = min(count, done + PIN_BYTES - (start + done) % PIN_BYTES)
        yield slice(done, end)
        done = end


def _pinning_error(size: int, purpose: str) -> OutOfResources:
    return OutOfResources(
        f"{size / 2**30:.1f} GiB of host memory could not be pinned for {purpose} of one rank (plan.offload); offload fewer layers "
        "(plan.layers), use more ranks, or raise the host's limit of locked memory (ulimit -l)"
    )
