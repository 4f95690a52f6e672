"""The Triton kernels of `packing`, for tensors on a GPU: one program unpacks or packs `TILE` elements of a record.

All arithmetic is on integers, so the bits are those of the plain reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.optim.packing import BLOCK, LEVELS, MASTER, SCALE, SECOND_MOMENT_SEED
from meshwright.spec.optimizers import MOMENTS

if TYPE_CHECKING:
    from meshwright.optim.packing import Packing

TILE = 4 * BLOCK
WIDTHS = {"fp32": 32, "bf16": 16, "int8": 8}
"""Bits of a moment in a record."""


def unpack_record(
    packing: Packing, fields: Mapping[str, Tensor], rounded: Tensor | None, outputs: Mapping[str, Tensor]
) -> None:
    """See `packing.unpack`."""
    first, second, none = fields[MOMENTS[0]], fields[MOMENTS[1]], fields[MOMENTS[0]]
    master = rounded is not None
    _unpack[(triton.cdiv(first.numel(), TILE),)](
        _bits(first), _bits(second), fields.get(MOMENTS[0] + SCALE, none), fields.get(MOMENTS[1] + SCALE, none),
        fields[MASTER] if master else none, rounded.view(torch.int16) if rounded is not None else none,
        *(outputs[name].view(torch.int32) for name in MOMENTS), outputs[MASTER].view(torch.int32) if master else none,
        first.numel(), WIDTHS[packing.moments], master, packing.tie_bits, LEVELS[MOMENTS[0]], LEVELS[MOMENTS[1]], BLOCK, TILE,
    )  # fmt: skip


def pack_record(
    packing: Packing, states: Mapping[str, Tensor], fields: Mapping[str, Tensor], rounded: Tensor | None, seed: Tensor, start: int
) -> None:  # fmt: skip
    """See `packing.pack`."""
    first, second, none = fields[MOMENTS[0]], fields[MOMENTS[1]], fields[MOMENTS[0]]
    master = rounded is not None
    _pack[(triton.cdiv(first.numel(), TILE),)](
        *(states[name].view(torch.int32) for name in MOMENTS), states[MASTER].view(torch.int32) if master else none,
        _bits(first), _bits(second), fields.get(MOMENTS[0] + SCALE, none), fields.get(MOMENTS[1] + SCALE, none),
        fields[MASTER] if master else none, rounded.view(torch.int16) if rounded is not None else none,
        seed, start, first.numel(), WIDTHS[packing.moments], master, packing.tie_bits, LEVELS[MOMENTS[0]], LEVELS[MOMENTS[1]],
        SECOND_MOMENT_SEED, BLOCK, TILE,
    )  # fmt: skip


def _bits(field: Tensor) -> Tensor:
    return field.view(torch.int32) if field.dtype == torch.float32 else field


@triton.jit(do_not_specialize=["size"])
def _unpack(
    first, second, first_scales, second_scales, remainders, rounded, first_out, second_out, master_out, size,
    width: tl.constexpr, master: tl.constexpr, tie_bits: tl.constexpr, first_levels: tl.constexpr, second_levels: tl.constexpr,
    block: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    index = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = index < size
    mean = tl.load(first + index, mask=inside, other=0).to(tl.int32)
    square = tl.load(second + index, mask=inside, other=0).to(tl.int32)
    down = tl.where(square < 0, 1, 0)
    if width == 32:
        if tie_bits:
            square = square & 0x7FFFFFFF
    elif width == 16:
        mean = mean << 16
        square = (square & 0x7FFF) << 16
    else:
        mean = _decode(mean & 0x7F, first_scales, index, inside, first_levels, block) | ((mean & 0x80) << 24)
        square = _decode(square, second_scales, index, inside, second_levels, block)
    tl.store(first_out + index, mean, mask=inside)
    tl.store(second_out + index, square, mask=inside)
    if master:
        high = tl.load(rounded + index, mask=inside, other=0).to(tl.int32) << 16
        weight = high + tl.load(remainders + index, mask=inside, other=0).to(tl.int32)
        if tie_bits:
            weight += down << 16
        tl.store(master_out + index, weight, mask=inside)


@triton.jit
def _decode(code, scales, index, inside, levels: tl.constexpr, block: tl.constexpr) -> tl.tensor:
    largest = tl.load(scales + index // block, mask=inside, other=0).to(tl.int32)
    relative = code >> 3
    return tl.where(relative >= 1, ((largest - levels + relative) << 23) | ((code & 7) << 20), 0)


@triton.jit(do_not_specialize=["size", "start"])
def _pack(
    first_in, second_in, master_in, first, second, first_scales, second_scales, remainders, rounded, seed_of_step, start, size,
    width: tl.constexpr, master: tl.constexpr, tie_bits: tl.constexpr, first_levels: tl.constexpr, second_levels: tl.constexpr,
    second_seed: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
) -> None:  # fmt: skip
    number = tl.program_id(0)
    index = number * tile + tl.arange(0, tile)
    inside = index < size
    mean = tl.load(first_in + index, mask=inside, other=0)
    square = tl.load(second_in + index, mask=inside, other=0)
    down = tl.zeros_like(mean)
    if master:
        weight = tl.load(master_in + index, mask=inside, other=0)
        last = (weight >> 16) & 1
        low = weight & 0xFFFF
        nan = (weight & 0x7FFFFFFF) > 0x7F800000
        high = tl.where(nan, (weight >> 16) | 0x40, (weight + 0x7FFF + last) >> 16)
        low = tl.where(nan, 0, low)
        down = tl.where((low == 0x8000) & (last == 0), 1, 0)
        if not tie_bits:
            low = tl.where(down == 1, 0x7FFF, low)
        tl.store(rounded + index, high.to(tl.int16), mask=inside)
        tl.store(remainders + index, low.to(tl.int16), mask=inside)
    if width == 32:
        if tie_bits:
            square = (square & 0x7FFFFFFF) | (down << 31)
        tl.store(first + index, mean, mask=inside)
        tl.store(second + index, square, mask=inside)
    else:
        seed = tl.load(seed_of_step).to(tl.uint32)
        position = (start + index.to(tl.int64)).to(tl.uint32)
        first_random = _random(position, seed)
        second_random = _random(position, seed ^ second_seed)
        if width == 16:
            mean = tl.where((mean & 0x7FFFFFFF) > 0x7F800000, mean, mean + (first_random & 0xFFFF)) >> 16
            square = tl.where((square & 0x7FFFFFFF) > 0x7F800000, square, square + (second_random & 0xFFFF)) >> 16
            if tie_bits:
                square = (square & 0x7FFF) | (down << 15)
            tl.store(first + index, mean.to(tl.int16), mask=inside)
            tl.store(second + index, square.to(tl.int16), mask=inside)
        else:
            blocks: tl.constexpr = tile // block
            block_index = number * blocks + tl.arange(0, blocks)
            block_inside = block_index * block < size
            mean_exponent = (mean & 0x7FFFFFFF) >> 23
            largest = tl.max(tl.reshape(mean_exponent, (blocks, block)), axis=1)
            code = _encode(mean, largest, first_random & 0xFFFFF, first_levels, blocks, block)
            code = code | ((mean >> 24) & 0x80)
            tl.store(first + index, code.to(tl.uint8), mask=inside)
            tl.store(first_scales + block_index, largest.to(tl.uint8), mask=block_inside)
            square_exponent = (square & 0x7FFFFFFF) >> 23
            largest = tl.max(tl.reshape(square_exponent, (blocks, block)), axis=1)
            code = _encode(square, largest, second_random & 0xFFFFF, second_levels, blocks, block)
            code = tl.where((code == 0) & (square_exponent >= 1), 8, code)
            tl.store(second + index, code.to(tl.uint8), mask=inside)
            tl.store(second_scales + block_index, largest.to(tl.uint8), mask=block_inside)


@triton.jit
def _encode(bits, largest, below, levels: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr) -> tl.tensor:
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    of_block = tl.reshape(tl.broadcast_to(largest[:, None], (blocks, block)), (blocks * block,))
    relative = exponent - of_block + levels
    code = (((relative << 23) | (magnitude & 0x7FFFFF)) + below) >> 20
    return tl.where((relative >= 1) & (exponent >= 1), tl.minimum(code, 8 * levels + 7), 0)


@triton.jit
def _random(position, seed) -> tl.tensor:
    """32 random bits of which callers use the low 20, as int32; see `packing.random_bits`."""
    x = position * 0x9E3779B1 + seed
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x ^ (x >> 16)).to(tl.int32, bitcast=True)
