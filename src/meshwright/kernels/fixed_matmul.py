"""Matmuls with weights, in 8 to 32 bits, whose result for a token does not depend on the other tokens.

Libraries select a kernel by the number of tokens, and different kernels add in different orders. Here the order follows from the weight's
shape and dtype only. The inner dimension is divided into `inner_splits` parts. Each part is summed tile by tile, and then the parts are
added in ascending order. With many tokens one program computes all parts of a tile of the result. With few tokens each part has a program,
so that all multiprocessors read the weight, and the program that ends last adds the parts. Both give the same bits.

With few tokens the time is that of reading the weight. A kernel that divides the inner dimension is then faster, so it is also used where
results may depend on the other tokens: for fp8 (`fp8_linear`) and for bf16 (`few_linear`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels import fp8_matmuls as fp8
from meshwright.kernels.fp8_matmuls import Fp8Matrix

TILE_BYTES = 128
"""Bytes of a row of a tile: a cache line, and the width of the tensor cores' tiles in shared memory."""
TILE_COLUMNS = 64
"""Outputs of a tile: the least of Hopper's tensor cores."""
PROGRAMS = 128
"""Number of programs for which parts are chosen: about one on each multiprocessor of an H200. Each keeps eight tiles in flight."""
MIN_TILES = 4
"""Fewest tiles of a part."""
MAX_SPLITS = 16
"""Most parts of an inner dimension."""
FEW_TOKENS = 64
"""Most tokens for which `fp8_linear` takes this kernel."""
FEW_ROWS = 16
"""Most tokens for which `few_linear` is faster than torch's matmul, on an H200.

With weights of 17 to 50 MB it takes 7 to 14 µs instead of 8 to 16: it reads the weight while the kernel before ends (docs/log.md).
"""
FEW_BYTES = 1 << 26
"""Most bytes of a weight for which it is faster."""
LONE_ROWS = 4
"""Up to so many tokens the parts of the inner dimension are so short that all multiprocessors read the weight."""


def inner_splits(columns: int, inner: int, itemsize: int) -> int:
    """Parts of the inner dimension for a weight `(columns, inner)` of numbers of `itemsize` bytes: a power of two."""
    tiles = -(-inner * itemsize // TILE_BYTES)
    most = min(PROGRAMS // max(1, -(-columns // TILE_COLUMNS)), tiles // MIN_TILES, MAX_SPLITS)
    return 1 << (max(most, 1).bit_length() - 1)


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias `(…, out)` of x `(…, in)`; the bits of a token's result do not depend on the other tokens.

    That holds on CUDA; on other devices torch's linear layer runs.
    """
    if not x.is_cuda or x.dtype == torch.float64:
        return F.linear(x, weight, bias)
    from meshwright.kernels.fixed_matmul_triton import tiled_matmul

    rows = x.flatten(0, -2).contiguous()
    return tiled_matmul(rows, weight, None, None, bias, weight.dtype).view(*x.shape[:-1], weight.shape[0])


def is_few(x: Tensor, weight: Tensor) -> bool:
    """Whether `few_linear` can compute x `(…, in)`: few tokens, no gradients, and a GPU with dependent launch."""
    if not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    from meshwright.kernels.dependent_launch_triton import is_supported

    few = 0 < x.numel() <= FEW_ROWS * x.shape[-1] and weight.nbytes <= FEW_BYTES
    half = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return few and half and weight.is_contiguous() and is_supported(x.device)


def few_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias `(…, out)` of x `(…, in)` where `is_few`; the order of additions depends on the number of tokens."""
    from meshwright.kernels.fixed_matmul_triton import tiled_matmul

    rows = x.flatten(0, -2).contiguous()
    columns, inner = weight.shape
    splits = inner_splits(columns, inner, weight.element_size())
    splits = splits if len(rows) <= LONE_ROWS else max(1, splits // 2)
    return tiled_matmul(rows, weight, None, None, bias, x.dtype, splits=splits).view(*x.shape[:-1], columns)


def fp8_linear(
    x: Fp8Matrix, weight: Fp8Matrix, bias: Tensor | None, dtype: torch.dtype, *, invariant: bool = False
) -> Tensor:
    """x · weightᵀ + bias `(…, out)` in `dtype` of fp8 matrices: x `(…, in)` and weight `(out, in)`, each with a scale per row.

    With `invariant` the bits of a token's result do not depend on the other tokens, on CUDA.
    """
    shape = (*x.values.shape[:-1], weight.values.shape[0])
    rows = Fp8Matrix(x.values.flatten(0, -2), x.scale.flatten(0, -2))
    if rows.values.is_cuda and (invariant or len(rows.values) <= FEW_TOKENS):
        from meshwright.kernels.fixed_matmul_triton import tiled_matmul

        return tiled_matmul(rows.values, weight.values, rows.scale, weight.scale, bias, dtype).view(shape)
    out = fp8.matmul(rows, weight, dtype, fast=True)
    return (out if bias is None else out + bias).view(shape)
