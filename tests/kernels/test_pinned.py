"""Page-locked host memory: complete pages stay locked until their owner is deleted, by the rules of CUDA's runtime."""

from __future__ import annotations

import gc

import pytest
import torch

from meshwright.kernels.pinned import PAGE, allocate_pinned
from meshwright.spec.errors import OutOfResources


class Runtime:
    """Locks pages as CUDA does: none twice."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.locked: dict[int, int] = {}
        self.capacity = capacity

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        first, last = address // PAGE, (address + size - 1) // PAGE
        overlaps = any(
            first <= (address + length - 1) // PAGE and address // PAGE <= last
            for address, length in self.locked.items()
        )
        if overlaps or sum(self.locked.values()) + size > self.capacity:
            return 712
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


class Owner:
    pass


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    cuda_runtime = Runtime(capacity=1 << 26)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda_runtime)
    return cuda_runtime


def test_pages_are_locked_while_the_owner_lives(runtime: Runtime) -> None:
    owner = Owner()
    sizes = (1, PAGE, 3 * PAGE + 5, (1 << 20) + 1)
    for size in sizes * 20:
        line = allocate_pinned(owner, size, "a test")  # dropped at once: its pages must not come again
        assert line.shape == (size,) and line.dtype == torch.uint8 and not line.any()
    assert len(runtime.locked) == 20 * len(sizes) and all(
        address % PAGE == size % PAGE == 0 for address, size in runtime.locked.items()
    )
    del owner
    gc.collect()
    assert not runtime.locked


def test_memory_that_cannot_be_locked_is_an_error(runtime: Runtime) -> None:
    with pytest.raises(
        OutOfResources, match=r"0.1 GiB of host memory could not be pinned for the optimizer of one rank.*ulimit -l"
    ):
        allocate_pinned(Owner(), 1 << 27, "the optimizer")
    assert not runtime.locked


def test_a_request_above_the_available_memory_is_the_same_error(runtime: Runtime) -> None:
    with pytest.raises(OutOfResources, match="could not be pinned for activations of one rank"):
        allocate_pinned(Owner(), 1 << 60, "activations")


def test_nothing_needs_no_lock(runtime: Runtime) -> None:
    assert allocate_pinned(Owner(), 0, "a test").numel() == 0 and not runtime.locked
