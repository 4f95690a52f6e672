"""Tensors whose memory is taken page by page."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from meshwright.serve.host_memory import zeros

CPU = torch.device("cpu")


def resident_bytes() -> int:
    """Memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_tensor_of_zeros_takes_memory_where_it_is_written(dtype: torch.dtype) -> None:
    before = resident_bytes()
    tensor = zeros((64, 1 << 22), dtype=dtype, device=CPU)
    assert tensor.shape == (64, 1 << 22) and tensor.dtype == dtype
    assert resident_bytes() - before < 16 << 20
    tensor[5].fill_(1)
    assert resident_bytes() - before < (16 << 20) + (1 << 22) * dtype.itemsize
    sums = tensor[3:7].float().sum(1)
    assert sums.tolist() == [0, 0, 1 << 22, 0]


def test_an_empty_tensor() -> None:
    assert zeros((0, 4), dtype=torch.float32, device=CPU).shape == (0, 4)
