"""Newton-Schulz iterations that orthogonalise matrices (Jordan et al. 2024, "Muon"). Matrices of the same shape are batched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.spec.optimizers import NEWTON_SCHULZ

EPSILON = 1e-7
"""Added to the norm of a matrix before the matrix is divided by it, so that zeros stay zeros."""
BATCH_ELEMENTS = 1 << 26
"""The most elements of a batch; it limits the memory of intermediate results."""


def compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the iterations: bf16 on a GPU (the coefficients tolerate it), otherwise the stored dtype of the weights."""
    return torch.bfloat16 if device.type == "cuda" and stored != torch.float64 else stored


def orthogonalise(matrices: Sequence[Tensor], iterations: int) -> list[Tensor]:
    """Return the nearest semi-orthogonal matrix of each matrix. Its singular values are about 0.7 to 1.2 instead of 1; zeros stay zeros."""
    results: list[Tensor | None] = [None] * len(matrices)
    shapes: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        shapes.setdefault(matrix.shape, []).append(index)
    for shape, indices in shapes.items():
        size = max(1, BATCH_ELEMENTS // shape.numel())
        for start in range(0, len(indices), size):
            selected = indices[start : start + size]
            batch = _iterate(torch.stack([matrices[index] for index in selected]), iterations)
            for index, result in zip(selected, batch.unbind(), strict=True):
                results[index] = result
    return [result for result in results if result is not None]


def _iterate(x: Tensor, iterations: int) -> Tensor:
    """Iterate on `x` `(matrices, rows, columns)`, transposed if there are more rows than columns."""
    transposed = x.shape[-2] > x.shape[-1]
    x = x.mT if transposed else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + EPSILON)
    a, b, c = NEWTON_SCHULZ
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if transposed else x
