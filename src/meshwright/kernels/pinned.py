"""Pinned (page-locked) host memory: copies to and from it run at the full rate of the link and overlap compute."""

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
"""Size of the parts in which memory is pinned beside training, between which the main thread can call the driver.

No copy may cross two parts.
"""


def allocate_pinned(owner: object, size: int, purpose: str, *, in_parts: bool = False) -> Tensor:
    """Return `size` zero bytes of pinned host memory, which is unlocked when `owner` is garbage-collected.

    With `in_parts` it is pinned in parts of `PIN_BYTES`, for threads beside training.

    torch rounds its own pinned buffers up to a power of two (at worst twice the bytes), and allocates them four times as slowly. Raises
    OutOfResources, which names the `purpose`, when host memory cannot be locked.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    # The buffer has pages of its own, because no page may be locked twice. It begins at a page, because torch looks a buffer up in the
    # CUDA runtime by its first address.
    try:
        pages = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise _pinning_error(size, purpose) from None
    with suppress(OSError):  # the kernel may lack huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    # Allocates the pages with all threads of the rank; cudaHostRegister would allocate them with one thread, many times as slowly.
    buffer.zero_()
    for part in buffer.split(PIN_BYTES) if in_parts else (buffer,):
        if not pin_pages(owner, part):
            raise _pinning_error(part.nbytes, purpose)
    return buffer[:size]


def pin_pages(owner: object, pages: Tensor) -> bool:
    """Lock the whole pages behind a byte tensor of the host until `owner` is garbage-collected; False if the driver refuses.

    The pages stay mapped as long as they are locked. If they were unmapped before, the driver would still take their addresses for
    pinned memory: the next buffer that the host puts there is copied to and from the old pages, so its contents are wrong without an error.
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
    runtime.cudaHostUnregister(pages.data_ptr())


def slices_within_parts(start: int, count: int) -> Iterator[slice]:
    """Slices of `count` bytes that begin at byte `start` of pinned memory, cut where two parts of `PIN_BYTES` meet."""
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
