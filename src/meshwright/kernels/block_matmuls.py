"""Matmuls in fp8 with weights that have a scale for each block of 128 × 128, as in DeepSeek-V3 (arXiv 2412.19437).

An input is rounded with a scale for each token and each 128 elements. So 128 inputs and 128 outputs share one pair of scales: the dot
product of 128 fp8 numbers is multiplied by both scales in fp32 before it is added to the result. Stored numbers and scales are used as they
are. Scales of inputs are powers of two (`fp8_matmuls.scale_of`); scales of weights may be any fp32 numbers.

On CUDA, `torch.nn.functional.scaled_mm` is used if it supports such scales (Hopper with CUDA 12.9 or later) and agrees with the Triton
kernel of `fixed_matmul`. Otherwise that kernel is used, whose order of additions is fixed. On an H200 the library takes 0.5 to 1.0 of the
kernel's time for 16 to 8,192 tokens and the shapes of Llama-3-8B. On other devices the values are multiplied in fp32.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.fp8_matmuls import E4M3, round_with_scale, scale_of
from meshwright.spec.weight_scheme import FP8_BLOCK

TESTED_ROWS = 67
"""Number of tokens with which the library is tried; it is not a multiple of ROW_MULTIPLE."""
ROW_MULTIPLE = GROUP_MULTIPLE = 4
"""The number of tokens, and the number of groups of inputs in a weight's scales, must be multiples of this for the library."""
TESTED_OUTPUTS = 1024
"""The library is tried with a weight of at most this many outputs, plus the outputs after the last whole block."""
TOLERANCE = 0.01
"""Largest accepted difference between library and kernel: norm of the difference over norm of the result. bf16 rounds by 0.002."""


class Fp8Groups(NamedTuple):
    """Tokens in e4m3, `values` `(…, inner)`, with a scale for each 128 elements.

    `scale` is `(groups, rows)` in fp32, where `rows` is the number of tokens rounded up to ROW_MULTIPLE. Scales after the last token are
    arbitrary.
    """

    values: Tensor
    scale: Tensor


class Fp8Blocks(NamedTuple):
    """A weight in e4m3, `values` `(out, in)`, with a scale for each block: `scale` `(⌈out / 128⌉, ≥ ⌈in / 128⌉)` in fp32."""

    values: Tensor
    scale: Tensor


def groups_of(inner: int) -> int:
    """Return the number of groups of 128 elements in `inner` elements; the last group may be smaller."""
    return -(-inner // FP8_BLOCK)


def scale_rows(rows: int) -> int:
    """Return the number of rows that the scales of `rows` tokens have."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def scale_shape(outer: int, inner: int) -> tuple[int, int]:
    """Return the shape of the scales of a weight `(outer, inner)`, as the library expects it."""
    return groups_of(outer), -(-groups_of(inner) // GROUP_MULTIPLE) * GROUP_MULTIPLE


def quantize_groups(x: Tensor) -> Fp8Groups:
    """Round x `(…, inner)` to e4m3. Each 128 elements are divided by the smallest power of two that brings them into e4m3's range."""
    rows = x.flatten(0, -2)
    inner = x.shape[-1]
    grouped = _padded(rows, 1, FP8_BLOCK).unflatten(1, (-1, FP8_BLOCK))
    scale = scale_of(grouped.abs().amax(-1), E4M3)
    values = round_with_scale(grouped, scale[..., None], E4M3).flatten(1)[:, :inner].contiguous()
    stored = scale.new_zeros(groups_of(inner), scale_rows(len(rows)))
    stored[:, : len(rows)] = scale.t()
    return Fp8Groups(values.view(x.shape), stored)


def quantize_blocks(weight: Tensor) -> Fp8Blocks:
    """Round a weight `(out, in)` to e4m3, with a power of two as the scale of each block."""
    outer, inner = weight.shape
    blocks = _padded(weight, FP8_BLOCK, FP8_BLOCK).unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    scale = scale_of(blocks.abs().amax((1, 3)), E4M3)
    values = round_with_scale(blocks, scale[:, None, :, None], E4M3).flatten(2).flatten(0, 1)
    return Fp8Blocks(values[:outer, :inner].contiguous(), scale)


def group_values(x: Fp8Groups) -> Tensor:
    """Return the numbers that x stands for, in fp32, exactly."""
    rows = x.values.flatten(0, -2)
    inner = x.values.shape[-1]
    scale = x.scale[:, : len(rows)].t().repeat_interleave(FP8_BLOCK, 1)[:, :inner]
    return (rows.float() * scale).view(x.values.shape)


def block_values(weight: Fp8Blocks) -> Tensor:
    """Return the numbers that a weight stands for, in fp32."""
    outer, inner = weight.values.shape
    scale = weight.scale.repeat_interleave(FP8_BLOCK, 0)[:outer].repeat_interleave(FP8_BLOCK, 1)[:, :inner]
    return weight.values.float() * scale


def block_linear(
    x: Fp8Groups, weight: Fp8Blocks, bias: Tensor | None, dtype: torch.dtype, *, invariant: bool = False
) -> Tensor:
    """Return x · weightᵀ + bias `(…, out)` in `dtype`, for x `(…, in)` and weight `(out, in)`.

    With `invariant` on CUDA, the bits of a token's result do not depend on the other tokens.
    """
    outer, inner = weight.values.shape
    shape = x.values.shape[:-1]
    rows = Fp8Groups(x.values.flatten(0, -2), x.scale)
    if not rows.values.is_cuda:
        out = (group_values(rows) @ block_values(weight).t()).to(dtype)
    elif not invariant and library_agrees(rows.values.device, outer, inner):
        out = library_matmul(rows, weight).to(dtype)
    else:
        from meshwright.kernels.fixed_matmul_triton import block_matmul

        return block_matmul(rows, weight, bias, dtype).view(*shape, outer)
    return (out if bias is None else out + bias).view(*shape, outer)


def library_matmul(x: Fp8Groups, weight: Fp8Blocks) -> Tensor:
    """Return x · weightᵀ `(tokens, out)` in bf16, computed by torch. Raises torch's error if torch has no such matmuls."""
    rows = x.scale.shape[1]
    out = F.scaled_mm(
        _with_rows(x.values, rows),
        weight.values.t(),
        x.scale.t(),
        F.ScalingType.BlockWise1x128,
        weight.scale.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return out[: len(x.values)]


@cache
def library_agrees(device: torch.device, outer: int, inner: int) -> bool:
    """Whether the library can multiply by weights of this kind and agrees with the Triton kernel. `device` computes both once.

    The weight for the trial has all inputs but only some of the outputs, so that it needs little memory.
    """
    from meshwright.kernels.fixed_matmul_triton import block_matmul

    outer = min(outer, TESTED_OUTPUTS + outer % FP8_BLOCK)
    draw = torch.Generator(device).manual_seed(0)
    x, matrix = (torch.randn(rows, inner, device=device, generator=draw) for rows in (TESTED_ROWS, outer))
    rows = quantize_groups(x)
    blocks = quantize_blocks(matrix)
    stored = torch.zeros(scale_shape(outer, inner), device=device)
    stored[:, : groups_of(inner)] = blocks.scale
    weight = blocks._replace(scale=stored)
    try:
        ours = library_matmul(rows, weight).float()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return False
    difference = ours - block_matmul(rows, weight, None, torch.float32)
    return bool(difference.norm() <= TOLERANCE * ours.norm())


def _padded(matrix: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    """Append rows and columns of zeros to a matrix, up to multiples of these numbers."""
    rows, columns = matrix.shape
    missing = (0, -columns % column_multiple, 0, -rows % row_multiple)
    return F.pad(matrix, missing) if any(missing) else matrix


def _with_rows(values: Tensor, rows: int) -> Tensor:
    """Return a contiguous matrix with `rows` rows, of which the last may be arbitrary.

    The kernels of `row_quantize` leave memory for these rows, so that the result is usually a view.
    """
    inner = values.shape[1]
    if len(values) == rows:
        return values
    if values.untyped_storage().nbytes() >= (values.storage_offset() + rows * inner) * values.element_size():
        return values.as_strided((rows, inner), (inner, 1))
    return F.pad(values.view(torch.uint8), (0, 0, 0, rows - len(values))).view(values.dtype)
