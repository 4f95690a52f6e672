"""Gradients packed rank by rank equal the rows of the full gradients, padded with zeros."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels.pack import pack

SHAPES = [(7, 3), (8, 2, 2), (1, 5), (2,), (4, 1)]


def laid_out(gradients: list[torch.Tensor], ranks: int, out_dtype: torch.dtype) -> torch.Tensor:
    """The same row by row."""
    packed = []
    for rank in range(ranks):
        for gradient in gradients:
            rows_per_rank = -(-len(gradient) // ranks)
            rank_rows = gradient[rank * rows_per_rank : (rank + 1) * rows_per_rank]
            missing = torch.zeros((rows_per_rank - len(rank_rows), *gradient.shape[1:]), dtype=gradient.dtype)
            packed.append(torch.cat([rank_rows, missing]).flatten().to(out_dtype))
    return torch.cat(packed)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_each_rank_has_its_rows(ranks: int, gradient_dtype: torch.dtype) -> None:
    out_dtype = torch.float32 if gradient_dtype == torch.bfloat16 else gradient_dtype
    gradients = [torch.randn(shape).to(gradient_dtype) for shape in SHAPES]
    expected = laid_out(gradients, ranks, out_dtype)
    buffer = torch.full_like(expected, torch.nan)
    pack(gradients, buffer, ranks)
    assert torch.equal(buffer, expected)
