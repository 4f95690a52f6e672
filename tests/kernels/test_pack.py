"""Gradients laid out rank by rank equal the rows of the whole ones, with zeros where there are no more."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels.pack import pack

SHAPES = [(7, 3), (8, 2, 2), (1, 5), (2,), (4, 1)]


def laid_out(gradients: list[torch.Tensor], ranks: int, out_dtype: torch.dtype) -> torch.Tensor:
    """The same row by row."""
    found = []
    for rank in range(ranks):
        for gradient in gradients:
            each = -(-len(gradient) // ranks)
            rows = gradient[rank * each : (rank + 1) * each]
            missing = torch.zeros((each - len(rows), *gradient.shape[1:]), dtype=gradient.dtype)
            found.append(torch.cat([rows, missing]).flatten().to(out_dtype))
    return torch.cat(found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_each_rank_has_its_rows(ranks: int, gradient_dtype: torch.dtype) -> None:
    out_dtype = torch.float32 if gradient_dtype == torch.bfloat16 else gradient_dtype
    gradients = [torch.randn(shape).to(gradient_dtype) for shape in SHAPES]
    wanted = laid_out(gradients, ranks, out_dtype)
    into = torch.full_like(wanted, torch.nan)
    pack(gradients, into, ranks)
    assert torch.equal(into, wanted)
