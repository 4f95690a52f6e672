"""The Triton kernel of `fixed_matmul`. Import it only with a CUDA device, because CPU builds of torch lack Triton.

A program computes tiles of the result. The constants of the kernel are:

    COLUMNS   outputs (rows of the weight) in a tile
    TOKENS    tokens in a tile
    INNER     inputs of each token that one step multiplies and adds

In the tensor-core instruction the rows of the weight are the first operand and the tokens are the second. The first
operand needs at least 64 rows, the second only 16, and a decode has few tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.block_matmuls import ROW_MULTIPLE, Fp8Blocks, Fp8Groups
from meshwright.kernels.dependent_launch_triton import (
    MOST_ARRIVALS,
    arrivals,
    await_previous,
    options,
    prefetch,
)
from meshwright.kernels.fixed_matmul import TILE_BYTES, inner_splits
from meshwright.spec.weight_scheme import FP8_BLOCK

GROUP = 8
"""Number of token tiles that are computed one after another with the same weights.

The weights of the group stay in the L2 cache meanwhile.
"""
AHEAD = 4
"""Number of inner tiles whose weights a program loads into the L2 cache before it waits for the previous kernel."""


class Tile(NamedTuple):
    """The size of a tile and how a program computes it.

    `columns` and `tokens` are the outputs and tokens of a tile, `warps` the warps of a program, and `stages` the stages of
    Triton's software pipeline.
    """

    columns: int
    tokens: int
    warps: int
    stages: int


def tile_of(tokens: int, itemsize: int) -> Tile:
    """Return the tile for `tokens` tokens whose numbers have `itemsize` bytes. The choice does not change the results."""
    if itemsize > 2:  # fp32 has no tensor cores, and a larger tile would not fit the registers
        return Tile(64, 16 if tokens <= 16 else 32, warps=4, stages=3)
    if tokens <= 32:
        return Tile(64, 16 if tokens <= 16 else 32, warps=4, stages=8)
    if tokens <= 64:
        return Tile(64, 64, warps=4, stages=6)
    return Tile(64, 128, warps=4, stages=4) if tokens <= 256 else Tile(128, 128, warps=8, stages=4)


def block_tile_of(tokens: int) -> Tile:
    """Return the tile for weights with a scale per block, for `tokens` tokens.

    Its outputs lie within one block of 128, so that the tile has one scale of the weight per 128 inputs.
    """
    return Tile(64, 128, warps=4, stages=4) if tokens > 64 else tile_of(tokens, 1)


def block_matmul(
    x: Fp8Groups,
    weight: Fp8Blocks,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    tile: Tile | None = None,
    splits: int | None = None,
    across: bool | None = None,
) -> Tensor:
    """Return x `(tokens, in)` · weight `(out, in)`ᵀ + bias, `(tokens, out)` in `dtype`, for fp8 values with block scales.

    An inner tile has 128 inputs. The dot product of 128 inputs is multiplied by the scale of the weight's block and by the
    scale of the token before it is added to the result. `tile`, `splits` and `across` are those of `tiled_matmul`.
    """
    tile = tile or block_tile_of(len(x.values))
    assert TILE_BYTES == FP8_BLOCK and FP8_BLOCK % tile.columns == 0, "a tile has one scale of the weight"
    return tiled_matmul(
        x.values,
        weight.values,
        x.scale,
        weight.scale,
        bias,
        dtype,
        tile=tile,
        splits=splits,
        across=across,
        blocks=True,
    )


def tiled_matmul(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | None,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    tile: Tile | None = None,
    splits: int | None = None,
    across: bool | None = None,
    blocks: bool = False,
    ahead: int | None = None,
) -> Tensor:
    """Return x `(tokens, in)` · weight `(out, in)`ᵀ, times the scales, plus the bias: `(tokens, out)` in `dtype`.

    All tensors are contiguous. int8 values are summed in int32, all other values in fp32.

    `x_scale`, `weight_scale`: fp32 `(tokens, 1)` and `(out, 1)`, or None. With `blocks` they are the scales of `Fp8Groups`
        and `Fp8Blocks` instead.
    `bias`: `(out,)`, or None.
    `tile`: the tile's size; None takes `tile_of`.
    `splits`: the number of parts into which the inner dimension is divided; None takes `inner_splits`.
    `across`: whether every part has a program of its own. None: only with at most 256 tokens. Such programs count their
        arrivals in one buffer of the device, so two streams must not run this kernel at the same time.
    `ahead`: inner tiles of weights to prefetch; None takes AHEAD.
    """
    tokens, inner = x.shape
    columns = weight.shape[0]
    out = torch.empty(tokens, columns, dtype=dtype, device=x.device)
    if not tokens:
        return out
    tile = tile or tile_of(tokens, x.element_size())
    splits = splits or inner_splits(columns, inner, x.element_size())
    tiles = triton.cdiv(tokens, tile.tokens) * triton.cdiv(columns, tile.columns)
    if across is None:
        across = tokens <= 256
    across = across and splits > 1 and tiles <= MOST_ARRIVALS
    # Placeholder: without `across` the kernel does not use `partial`.
    partial = out
    integer = x.dtype == torch.int8
    if across:
        sum_dtype = torch.int32 if integer else torch.float32
        partial = torch.empty(tiles * splits, tile.columns * tile.tokens, dtype=sum_dtype, device=x.device)
    inner_tile = TILE_BYTES // x.element_size()
    _matmul[(tiles, splits if across else 1)](
        x,
        weight,
        x if x_scale is None else x_scale,
        x if weight_scale is None else weight_scale,
        x if bias is None else bias,
        out,
        partial,
        arrivals(x.device),
        tokens,
        columns,
        inner,
        splits,
        x_scale.shape[1] // ROW_MULTIPLE if blocks and x_scale is not None else 0,  # x_quads
        weight_scale.shape[1] if blocks and weight_scale is not None else 0,  # groups
        COLUMNS=tile.columns,
        TOKENS=tile.tokens,
        INNER=inner_tile,
        EVEN=inner % inner_tile == 0,
        IMPRECISE=inner_tile if x.element_size() == 1 and not integer else 0,  # fp8: reduced precision within a tile
        SUM=tl.int32 if integer else tl.float32,
        ACROSS=across,
        SCALED=x_scale is not None and not blocks,
        BLOCKS=blocks,
        BIAS=bias is not None,
        GROUP=GROUP,
        AHEAD=AHEAD if ahead is None else ahead,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options(x.device),
    )
    return out


@triton.jit
def sum_tiles(
    x,
    weight,
    begin,
    end,
    token_used,
    inner,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
    IMPRECISE: tl.constexpr,
    SUM: tl.constexpr,
) -> tl.tensor:
    """Return the dot products `(COLUMNS, TOKENS)` in the dtype SUM over the inner tiles `begin` to end - 1.

    `weight` `(COLUMNS,)` and `x` `(TOKENS,)` are pointers to the first number of each row of the operands. `token_used`
    `(TOKENS,)` is false for tokens after the last one. `inner` is the number of inputs; EVEN says that INNER divides it.
    """
    sums = tl.zeros([COLUMNS, TOKENS], SUM)
    for tile in range(begin, end):
        inputs, weights = load_tiles(x, weight, tile, token_used, inner, INNER, EVEN)
        sums = tl.dot(
            weights, tl.trans(inputs), sums, input_precision="ieee", max_num_imprecise_acc=IMPRECISE, out_dtype=SUM
        )
    return sums


@triton.jit
def load_tiles(
    x, weight, tile, token_used, inner, INNER: tl.constexpr, EVEN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the inputs `(TOKENS, INNER)` and the weights `(COLUMNS, INNER)` of one inner tile; see `sum_tiles`."""
    index = tile * INNER + tl.arange(0, INNER)
    if EVEN:
        inputs = tl.load(x[:, None] + index[None, :], mask=token_used[:, None], other=0.0)
        weights = tl.load(weight[:, None] + index[None, :])
    else:
        inside = (index < inner)[None, :]
        inputs = tl.load(x[:, None] + index[None, :], mask=token_used[:, None] & inside, other=0.0)
        weights = tl.load(weight[:, None] + index[None, :], mask=inside, other=0.0)
    return inputs, weights


@triton.jit
def sum_blocks(
    x,
    weight,
    x_scale,
    weight_scale,
    x_quads,
    begin,
    end,
    token_used,
    inner,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Return the same as `sum_tiles`, in fp32, with the dot product of each inner tile multiplied by its two scales.

    `x_scale` points to each token's scale of the first tile. The scale of the next tile is 4 · `x_quads` numbers further.
    `weight_scale` points to the columns' scale of the first tile; the next tile's scale is the next number.
    The scales of a tile are loaded while the previous tile is computed, so that the matmul does not wait for them.
    """
    sums = tl.zeros([COLUMNS, TOKENS], tl.float32)
    scale = tl.load(x_scale + begin * (x_quads * 4), mask=token_used, other=0.0) * tl.load(weight_scale + begin)
    for tile in range(begin, end):
        inputs, weights = load_tiles(x, weight, tile, token_used, inner, INNER, EVEN)
        following = tl.minimum(tile + 1, end - 1)
        token_scale = tl.load(x_scale + following * (x_quads * 4), mask=token_used, other=0.0)
        next_scale = token_scale * tl.load(weight_scale + following)
        sums += tl.dot(weights, tl.trans(inputs), out_dtype=tl.float32) * scale[None, :]
        scale = next_scale
    return sums


@triton.jit
def store_matmul(
    sums, out, x_scale, weight_scale, bias, token, column, tokens, columns, SCALED: tl.constexpr, BIAS: tl.constexpr
) -> None:
    """Multiply the sums `(COLUMNS, TOKENS)` by the scales, add the bias, and store them as `out[token, column]`."""
    column_used = column < columns
    sums = sums.to(tl.float32)
    if SCALED:
        sums = sums * tl.load(weight_scale + column, mask=column_used, other=0.0)[:, None]
        sums = sums * tl.load(x_scale + token, mask=token < tokens, other=0.0)[None, :]
    if BIAS:
        sums = sums + tl.load(bias + column, mask=column_used, other=0.0).to(tl.float32)[:, None]
    target = out + token.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, tl.trans(sums).to(out.dtype.element_ty), mask=(token < tokens)[:, None] & column_used[None, :])


@triton.jit(do_not_specialize=["tokens", "splits", "x_quads"])
def _matmul(
    x,
    weight,
    x_scale,
    weight_scale,
    bias,
    out,
    partial,
    arrivals,
    tokens,
    columns,
    inner,
    splits,
    x_quads,
    groups,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN: tl.constexpr,
    IMPRECISE: tl.constexpr,
    SUM: tl.constexpr,
    ACROSS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Compute one tile of `out`, or one part of its inner dimension.

    Grid: (tiles, splits) with ACROSS, else (tiles, 1). With ACROSS every program stores its part in `partial`
    `(tiles, splits, COLUMNS, TOKENS)`, and the program that arrives last adds the parts in ascending order.
    `x_quads` and `groups` are the row strides of the block scales: of x in units of 4 numbers, of the weight in numbers.
    """
    # The order of the tiles: GROUP tiles of tokens with the first columns, then the same tokens with the next columns.
    number = tl.program_id(0)
    column_tiles = tl.cdiv(columns, COLUMNS)
    token_tiles = tl.cdiv(tokens, TOKENS)
    # Example with GROUP 8 and 10 column tiles: programs 0 to 7 compute the token tiles 0 to 7 of column tile 0, programs 8 to 15
    # the same token tiles of column tile 1, and so on; program 80 begins with token tile 8.
    first_tile = number // (GROUP * column_tiles) * GROUP
    group = tl.minimum(token_tiles - first_tile, GROUP)
    within = number % (GROUP * column_tiles)
    token = (first_tile + within % group) * TOKENS + tl.arange(0, TOKENS)
    column = within // group * COLUMNS + tl.arange(0, COLUMNS)
    token_used = token < tokens
    x += token.to(tl.int64) * inner
    # Columns after the last one load the last column's weights; their results are not stored.
    weight += tl.minimum(column, columns - 1).to(tl.int64) * inner
    if BLOCKS:  # all columns of this tile lie in one block of 128, so they share its scales
        x_scale += token
        weight_scale += within // group * COLUMNS // 128 * groups
    tiles = tl.cdiv(inner, INNER)
    if AHEAD > 0:
        first = tiles * tl.program_id(1) // splits if ACROSS else 0
        lines = tl.minimum(first + tl.arange(0, AHEAD), tiles - 1) * INNER
        prefetch(weight[:, None] + lines[None, :], DEPENDENT)
    await_previous(DEPENDENT)
    total = tl.zeros([COLUMNS, TOKENS], SUM)
    if ACROSS:
        split = tl.program_id(1)
        begin = tiles * split // splits
        end = tiles * (split + 1) // splits
        if BLOCKS:
            sums = sum_blocks(
                x, weight, x_scale, weight_scale, x_quads, begin, end, token_used, inner, COLUMNS, TOKENS, INNER, EVEN
            )
        else:
            sums = sum_tiles(x, weight, begin, end, token_used, inner, COLUMNS, TOKENS, INNER, EVEN, IMPRECISE, SUM)
        place = tl.arange(0, COLUMNS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        parts = partial + (number * splits).to(tl.int64) * (COLUMNS * TOKENS) + place
        tl.store(parts + split * (COLUMNS * TOKENS), sums, mask=token_used[None, :])
        # All threads must have stored their numbers before one of them counts this program as arrived.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + number, 1, sem="acq_rel") == splits - 1:
            tl.store(arrivals + number, 0)
            for index in range(splits):
                # Read from the L2 cache: the L1 cache may have values from before the other programs' stores.
                total += tl.load(
                    parts + index * (COLUMNS * TOKENS), mask=token_used[None, :], other=0.0, cache_modifier=".cg"
                )
            store_matmul(total, out, x_scale, weight_scale, bias, token, column, tokens, columns, SCALED, BIAS)
    else:
        for index in range(splits):
            begin = tiles * index // splits
            end = tiles * (index + 1) // splits
            if BLOCKS:
                total += sum_blocks(
                    x,
                    weight,
                    x_scale,
                    weight_scale,
                    x_quads,
                    begin,
                    end,
                    token_used,
                    inner,
                    COLUMNS,
                    TOKENS,
                    INNER,
                    EVEN,
                )
            else:
                total += sum_tiles(
                    x, weight, begin, end, token_used, inner, COLUMNS, TOKENS, INNER, EVEN, IMPRECISE, SUM
                )
        store_matmul(total, out, x_scale, weight_scale, bias, token, column, tokens, columns, SCALED, BIAS)
