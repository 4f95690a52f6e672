"""Matmuls with weights of 8 to 32 bits, whose result for a token does not depend on the other tokens of the batch.

Libraries select a kernel by the number of tokens, and different kernels add in different orders. Here the order of
additions follows from the weight's shape and dtype only:

1. The inner dimension is divided into `inner_splits` parts.
2. Each part is summed tile by tile.
3. The parts are added in ascending order.

With many tokens one program computes all parts of a tile of the result. With few tokens each part has its own program,
so that all multiprocessors read the weight; the program that ends last adds the parts. Both give the same bits.

With few tokens the time is the time of reading the weight, and a kernel that divides the inner dimension is faster than
the library. So this kernel is also used where results may depend on the other tokens: for fp8 (`fp8_linear`) and for
bf16 (`few_linear`).
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
"""Outputs of a tile: the fewest that Hopper's tensor cores compute."""
PROGRAMS = 128
"""Number of programs that `inner_splits` aims at: about one per multiprocessor of an H200. Each keeps eight tiles in flight."""
MIN_TILES = 4
"""A part of the inner dimension has at least this many tiles."""
MAX_SPLITS = 16
"""The inner dimension is divided into at most this many parts."""
FEW_TOKENS = 64
"""`fp8_linear` uses this kernel for at most this many tokens (unless `invariant`)."""
FEW_ROWS = 16
"""`few_linear` is used for at most this many tokens: there it is faster than torch's matmul on an H200.

With weights of 17 to 50 MB it takes 7 to 14 µs, and torch's matmul 8 to 16 µs. It reads the weight while the previous kernel
ends (docs/log.md).
"""
FEW_BYTES = 1 << 26
"""`few_linear` is used for weights of at most this many bytes; with larger ones it is not faster."""
LONE_ROWS = 4
"""With more tokens than this, `few_linear` divides the inner dimension into half as many parts."""


def inner_splits(columns: int, inner: int, itemsize: int) -> int:
    """Return into how many parts the inner dimension of a weight `(columns, inner)` is divided: a power of two.

    A number of the weight has `itemsize` bytes. Example: a bf16 weight `(4096, 4096)` has 64 column tiles and 64 inner
    tiles, so 128 // 64 = 2 parts.
    """
    tiles = -(-inner * itemsize // TILE_BYTES)
    parts_limit = min(PROGRAMS // max(1, -(-columns // TILE_COLUMNS)), tiles // MIN_TILES, MAX_SPLITS)
    return 1 << (max(parts_limit, 1).bit_length() - 1)


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias `(…, out)` of x `(…, in)` and weight `(out, in)`, in the weight's dtype.

    On CUDA the bits of a token's result do not depend on the other tokens. On other devices, and in fp64, torch's linear
    layer runs.
    """
    if not x.is_cuda or x.dtype == torch.float64:
        return F.linear(x, weight, bias)
    from meshwright.kernels.fixed_matmul_triton import tiled_matmul

    rows = x.flatten(0, -2).contiguous()
    return tiled_matmul(rows, weight, None, None, bias, weight.dtype).view(*x.shape[:-1], weight.shape[0])


def is_few(x: Tensor, weight: Tensor) -> bool:
    """Return whether `few_linear` can compute x `(…, in)`: few tokens, no gradients, and a GPU with dependent launch."""
    if not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    from meshwright.kernels.dependent_launch_triton import is_supported

    few = 0 < x.numel() <= FEW_ROWS * x.shape[-1] and weight.nbytes <= FEW_BYTES
    half = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return few and half and weight.is_contiguous() and is_supported(x.device)


def few_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias `(…, out)` of x `(…, in)`; only where `is_few`.

    The order of additions depends on the number of tokens.
    """
    from meshwright.kernels.fixed_matmul_triton import tiled_matmul

    rows = x.flatten(0, -2).contiguous()
    columns, inner = weight.shape
    splits = inner_splits(columns, inner, weight.element_size())
    splits = splits if len(rows) <= LONE_ROWS else max(1, splits // 2)
    return tiled_matmul(rows, weight, None, None, bias, x.dtype, splits=splits).view(*x.shape[:-1], columns)


def fp8_linear(
    x: Fp8Matrix, weight: Fp8Matrix, bias: Tensor | None, dtype: torch.dtype, *, invariant: bool = False
) -> Tensor:
    """Return x · weightᵀ + bias `(…, out)` in `dtype` for fp8 matrices x `(…, in)` and weight `(out, in)`.

    Both have a scale per row. With `invariant` the bits of a token's result do not depend on the other tokens (on CUDA).
    """
    shape = (*x.values.shape[:-1], weight.values.shape[0])
    rows = Fp8Matrix(x.values.flatten(0, -2), x.scale.flatten(0, -2))
    if rows.values.is_cuda and (invariant or len(rows.values) <= FEW_TOKENS):
        from meshwright.kernels.fixed_matmul_triton import tiled_matmul

        return tiled_matmul(rows.values, weight.values, rows.scale, weight.scale, bias, dtype).view(shape)
    out = fp8.matmul(rows, weight, dtype, fast=True)
    return (out if bias is None else out + bias).view(shape)
