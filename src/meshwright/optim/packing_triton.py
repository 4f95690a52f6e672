"""The Triton kernel of `packed_update`. Each program unpacks, updates and packs `TILE` elements of a record.

So a packed parameter costs one read and one write of its record, weight and gradient. The integer arithmetic gives the same bits as the
plain reference (`packing`), and the update the same bits as `fused_triton`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.optim.fused_triton import updated
from meshwright.optim.packing import BLOCK, LEVELS, MASTER, SCALE, SECOND_MOMENT_SEED
from meshwright.spec.optimizers import MOMENTS

if TYPE_CHECKING:
    from meshwright.optim.packing import ChunkPacking

TILE = 4 * BLOCK
WIDTHS = {"fp32": 32, "bf16": 16, "int8": 8}
"""Number of bits of a moment in a record."""


def update_record(
    packing: ChunkPacking,
    fields: Mapping[str, Tensor],
    weights: Tensor,
    gradient: Tensor,
    position: int,
    *,
    rates: Tensor,
    seeds: Tensor,
    index: int,
    factor: Tensor,
    skip: Tensor,
    betas: tuple[float, float],
    epsilon: float,
    decay_factor: float,
) -> None:
    """Update a segment of a parameter. `fields` begin with the segment's first element.

    - `weights` `(count,)`: the bf16 values of the master weights if the record has their remainders, else fp32 weights.
    - `position`: position of the segment's first element among all elements of the optimizer.
    - `rates` `(2, parameters)`: the learning rate divided by the first bias correction, and the inverse root of the second
      (`fused.corrected_rates`).
    - `seeds` `(parameters,)`: seeds of the rounding.
    - `index`: which parameter of `rates` and `seeds` is updated.
    """
    first = fields[MOMENTS[0]]
    second = fields[MOMENTS[1]]
    count = gradient.numel()
    _packed_adamw[(triton.cdiv(count, TILE),)](
        _bits(first),
        _bits(second),
        fields.get(MOMENTS[0] + SCALE, first),
        fields.get(MOMENTS[1] + SCALE, first),
        fields.get(MASTER, first),
        weights.view(torch.int16) if packing.master else weights,
        gradient,
        rates,
        seeds,
        factor,
        skip,
        index,
        rates.shape[1],
        position,
        count,
        *betas,
        *(1 - beta for beta in betas),
        epsilon,
        decay_factor,
        WIDTHS[packing.moments],
        packing.master,
        packing.tie_bits,
        LEVELS[MOMENTS[0]],
        LEVELS[MOMENTS[1]],
        SECOND_MOMENT_SEED,
        BLOCK,
        TILE,
    )


def _bits(field: Tensor) -> Tensor:
    return field.view(torch.int32) if field.dtype == torch.float32 else field


@triton.jit(do_not_specialize=["index", "parameters", "position", "count"])
def _packed_adamw(
    first,
    second,
    first_scales,
    second_scales,
    remainders,
    weights,
    gradients,
    rates,
    seeds,
    factor,
    skip,
    index,
    parameters,
    position,
    count,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    epsilon,
    decay_factor,
    width: tl.constexpr,
    master: tl.constexpr,
    tie_bits: tl.constexpr,
    first_levels: tl.constexpr,
    second_levels: tl.constexpr,
    second_seed: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    begin = tl.program_id(0) * tile
    if tl.load(skip) == 0:
        scale = tl.load(factor)
        rate = tl.load(rates + index)
        root = tl.load(rates + parameters + index)
        seed = tl.load(seeds + index).to(tl.uint32)
        # Only whole tiles can be loaded without a mask, as vectors.
        if begin + tile <= count:
            _update_tile(
                first,
                second,
                first_scales,
                second_scales,
                remainders,
                weights,
                gradients,
                begin,
                None,
                count,
                position,
                seed,
                scale,
                beta1,
                beta2,
                one_minus_beta1,
                one_minus_beta2,
                rate,
                root,
                epsilon,
                decay_factor,
                width,
                master,
                tie_bits,
                first_levels,
                second_levels,
                second_seed,
                block,
                tile,
            )
        else:
            _update_tile(
                first,
                second,
                first_scales,
                second_scales,
                remainders,
                weights,
                gradients,
                begin,
                begin + tl.arange(0, tile) < count,
                count,
                position,
                seed,
                scale,
                beta1,
                beta2,
                one_minus_beta1,
                one_minus_beta2,
                rate,
                root,
                epsilon,
                decay_factor,
                width,
                master,
                tie_bits,
                first_levels,
                second_levels,
                second_seed,
                block,
                tile,
            )


@triton.jit
def _update_tile(
    first,
    second,
    first_scales,
    second_scales,
    remainders,
    weights,
    gradients,
    begin,
    inside,
    count,
    position,
    seed,
    scale,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    rate,
    root,
    epsilon,
    decay_factor,
    width: tl.constexpr,
    master: tl.constexpr,
    tie_bits: tl.constexpr,
    first_levels: tl.constexpr,
    second_levels: tl.constexpr,
    second_seed: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    index = begin + tl.arange(0, tile)
    mean = _load(first + index, inside).to(tl.int32)
    square = _load(second + index, inside).to(tl.int32)
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
    if master:
        bits = (_load(weights + index, inside).to(tl.int32) << 16) + _load(remainders + index, inside).to(tl.int32)
        if tie_bits:
            bits += down << 16
        weight = bits.to(tl.float32, bitcast=True)
    else:
        weight = _load(weights + index, inside)
    weight, new_mean, new_square = updated(
        weight,
        _load(gradients + index, inside),
        mean.to(tl.float32, bitcast=True),
        square.to(tl.float32, bitcast=True),
        scale,
        beta1,
        beta2,
        one_minus_beta1,
        one_minus_beta2,
        rate,
        root,
        epsilon,
        decay_factor,
    )
    mean = new_mean.to(tl.int32, bitcast=True)
    square = new_square.to(tl.int32, bitcast=True)
    down = tl.zeros_like(mean)
    if master:
        bits = weight.to(tl.int32, bitcast=True)
        last = (bits >> 16) & 1
        low = bits & 0xFFFF
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        high = tl.where(nan, (bits >> 16) | 0x40, (bits + 0x7FFF + last) >> 16)
        low = tl.where(nan, 0, low)
        down = tl.where((low == 0x8000) & (last == 0), 1, 0)
        if not tie_bits:
            low = tl.where(down == 1, 0x7FFF, low)
        tl.store(weights + index, high.to(tl.int16), mask=inside)
        tl.store(remainders + index, low.to(tl.int16), mask=inside)
    else:
        tl.store(weights + index, weight, mask=inside)
    if width == 32:
        if tie_bits:
            square = (square & 0x7FFFFFFF) | (down << 31)
        tl.store(first + index, mean, mask=inside)
        tl.store(second + index, square, mask=inside)
    else:
        element = (position + index.to(tl.int64)).to(tl.uint32)
        first_random = _random(element, seed)
        second_random = _random(element, seed ^ second_seed)
        if width == 16:
            mean = tl.where((mean & 0x7FFFFFFF) > 0x7F800000, mean, mean + (first_random & 0xFFFF)) >> 16
            square = tl.where((square & 0x7FFFFFFF) > 0x7F800000, square, square + (second_random & 0xFFFF)) >> 16
            if tie_bits:
                square = (square & 0x7FFF) | (down << 15)
            tl.store(first + index, mean.to(tl.int16), mask=inside)
            tl.store(second + index, square.to(tl.int16), mask=inside)
        else:
            blocks: tl.constexpr = tile // block
            block_index = begin // block + tl.arange(0, blocks)
            block_inside = block_index * block < count
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
def _load(pointers, inside) -> tl.tensor:
    """Load the values at `pointers`; 0 where `inside` is false. If `inside` is None, all are loaded without a mask."""
    if inside is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def _decode(code, scales, index, inside, levels: tl.constexpr, block: tl.constexpr) -> tl.tensor:
    largest = _load(scales + index // block, inside).to(tl.int32)
    relative = code >> 3
    return tl.where(relative >= 1, ((largest - levels + relative) << 23) | ((code & 7) << 20), 0)


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
    """Return 32 random bits as int32, as `packing.random_bits` does; callers use the lowest 16 or 20."""
    x = position * 0x9E3779B1 + seed
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x ^ (x >> 16)).to(tl.int32, bitcast=True)
