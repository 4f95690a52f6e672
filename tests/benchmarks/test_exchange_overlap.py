"""Hidden exchange of tokens in a trace that is counted by hand."""

from __future__ import annotations

import pytest
from exchange_overlap import exchange_overlap
from kernel_trace import Kernel, KernelClass

EXCHANGE = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name: str, kernel_class: KernelClass, start: float, end: float) -> Kernel:
    return Kernel(name=name, kernel_class=kernel_class, start=start, end=end, launched=None, op="")


def test_only_exchanges_of_the_last_step_beside_compute_are_hidden() -> None:
    kernels = [
        kernel(EXCHANGE, "communication", 0, 1),
        kernel("FusedAdam", "optimizer", 1, 2),
        kernel("gemm", "gemm", 2, 4),
        kernel(EXCHANGE, "communication", 3, 5),
        kernel("ncclDevKernel_AllGather", "communication", 4, 6),
        kernel(EXCHANGE, "communication", 6, 7),
        kernel("gemm", "gemm", 6.5, 6.75),
        kernel("norm", "elementwise", 6.5, 7),
        kernel("FusedAdam", "optimizer", 8, 10),
    ]
    expected = {"step_seconds": 8, "exchange_seconds": 3, "hidden_share": 0.5}
    assert exchange_overlap(kernels) == pytest.approx(expected)
