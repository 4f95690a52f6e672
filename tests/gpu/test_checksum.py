"""GPU: checksums of tensors equal those that the CPU computes of the same content, without a synchronisation."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels.checksum import COLUMNS, digests

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_sums_equal_those_of_the_cpu(dtype: torch.dtype) -> None:
    sizes = (0, 1, 3, 4096, 8 * COLUMNS, 9 * COLUMNS + 5, (1 << 24) + 7)
    tensors = [torch.randn(size, device="cuda").to(dtype) for size in sizes]
    tensors.append(tensors[-1][3:])
    host = [tensor.cpu() for tensor in tensors]
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_device = digests(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(on_device.cpu(), digests(host))
