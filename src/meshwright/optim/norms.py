"""Computes norms of tensors with rounding errors that do not grow with the size of the tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.kernels.norm import accumulate_dtype

BLOCK = 64
"""On a CPU torch adds the squares of this many elements one after another; the norm of a block has a relative error up to 32 · 2⁻²³."""


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norms of tensors with the same dtype, fp64 `(tensors,)`. No tensor may be empty.

    The relative error is below 4e-6 in the worst case, and usually near 1e-9. On GPUs torch adds squares in a tree. On CPUs it adds them
    one after another in fp32, which loses 0.1% of the sum of 20 million elements. There the norms of blocks are added in fp64 instead,
    which takes the same time.
    """
    dtype = tensors[0].dtype
    if tensors[0].device.type == "cpu" and dtype != torch.float64:
        return torch.stack([_by_block(tensor) for tensor in tensors])
    return torch.stack(torch._foreach_norm(list(tensors), dtype=accumulate_dtype(dtype))).double()


def _by_block(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor on the CPU, an fp64 scalar."""
    flat = tensor.reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    parts = [flat[:whole].view(-1, BLOCK), flat[whole:].view(1, -1)]
    blocks = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts if part.numel()]
    return torch.linalg.vector_norm(torch.cat(blocks), dtype=torch.float64)
