"""Ranges are copied whole and their sums are those of `digests`: the reference, and the kernel in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.kernels.checksum import digests
from meshwright.kernels.range_copies import copy_ranges

CPU = torch.device("cpu")
SIZES = (16, 8 * 1024 + 16, 65536, 3 * 65536 + 48)
"""Bytes: less than a tile, more than one, all tiles of a program, and several programs."""


def interpreted(ranges: Tensor, device: torch.device) -> Tensor:
    pytest.importorskip("triton")
    from meshwright.kernels.range_copies_triton import fused_copy

    return fused_copy(ranges, device)


@pytest.mark.parametrize("copy", [copy_ranges, interpreted])
def test_copies_and_sums(copy: Callable[[Tensor, torch.device], Tensor]) -> None:
    if copy is interpreted and torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernel itself")
    draw = torch.Generator().manual_seed(0)
    words = [torch.randint(-(2**63), 2**63 - 1, (size // 8,), generator=draw) for size in SIZES]
    copies = [torch.full((len(each) + 1,), -7) for each in words]
    ranges = [(each.data_ptr(), other.data_ptr(), each.nbytes) for each, other in zip(words, copies, strict=True)]
    sums = copy(torch.tensor([*ranges, (words[0].data_ptr(), 0, words[0].nbytes)]), CPU)
    assert torch.equal(sums, digests([*words, words[0]]))
    for each, other in zip(words, copies, strict=True):
        assert torch.equal(other[:-1], each) and other[-1] == -7, "nothing behind a range is written"
