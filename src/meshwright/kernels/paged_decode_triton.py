"""The Triton kernels of `paged_attention` for sequences with few queries. Import them only with a CUDA device.

One program computes all query heads of one key/value head over one part (split) of a sequence's tokens. A second kernel
combines the splits. The grid depends only on the number of sequences and of splits, so that a CUDA graph can be replayed
with other context lengths.

The constants of the kernels are:

    QUERIES           queries of each sequence
    GROUP             query heads of each key/value head
    PAIRS             rows of a program: pairs (query, query head of the group), at least 16 for the tensor cores
    TILE              cached tokens of a tile
    HEAD_DIM, DIMS    head_dim, and head_dim rounded up to a power of two
    BLOCK             tokens of a cache block
    WINDOW            sliding window in tokens, 0 for none
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.dependent_launch_triton import await_previous, options

TILE_BYTES = 16384
"""Bytes of a tile of keys in bf16 or fp32. A tile of an fp8 cache has as many tokens as in bf16, and half the bytes.

A tile of keys and a tile of values in two pipeline stages are 64 KiB, so that three programs fit into the shared memory
of a multiprocessor.
"""


class AttentionLaunch(NamedTuple):
    """How an attention kernel is launched.

    `tile`: cached tokens of a tile. `warps`: warps of a program. `stages`: stages of Triton's software pipeline.
    `pairs`: pairs (query, query head) that a program computes.
    """

    tile: int
    warps: int
    stages: int
    pairs: int = 16


def decode_launch(head_dim: int, itemsize: int, block_tokens: int, *, small: bool = False) -> AttentionLaunch:
    """Return the launch parameters for a cache of numbers of `itemsize` bytes in blocks of `block_tokens` tokens.

    A tile is at most a block of 32 or more tokens, so that its rows lie next to each other. The values were found by trial
    on an H200. With `small`, tiles of bf16 are half as large and more programs fit on a multiprocessor;
    `paged_attention.LARGE_TILES` says when large tiles are faster.
    """
    narrow = itemsize == 1 or (small and itemsize == 2)
    tile = min(128, max(16, TILE_BYTES // (triton.next_power_of_2(head_dim) * max(itemsize, 2))))
    stages = 3
    if small and itemsize == 2:
        tile = max(16, tile // 2)
        stages = 4
    return AttentionLaunch(
        min(tile, block_tokens) if block_tokens >= 32 else tile, warps=2 if narrow else 4, stages=stages
    )


def paged_decode(
    q: Tensor,
    cache_layer: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    out: Tensor,
    *,
    queries: int,
    splits: int,
    window: int | None,
    scales: Tensor | None,
    sinks: Tensor | None = None,
    cap: float | None = None,
    least: int = 1,
    launch: AttentionLaunch | None = None,
) -> None:
    """Write the attention of q `(sequences · queries, heads, head_dim)` into `out` of the same shape.

    `queries` is the number of queries of each sequence. Each context is divided into at most `splits` parts of at least
    `least` tokens. `window`: a query sees this many last tokens, itself included; None: all. `scales` are those of an fp8
    cache, `(2, kv_heads)`: of keys, then of values. `sinks` is `(heads,)`. `cap` limits scores to ±cap by tanh.
    `cache_layer`, `block_tables` and `context_lengths` are those of `paged_attention.paged_attention`.
    """
    sequences = len(context_lengths)
    heads, head_dim = q.shape[1:]
    kv_heads = cache_layer.shape[2]
    block_tokens = cache_layer.shape[3]
    rows = queries * heads // kv_heads
    launch = launch or decode_launch(head_dim, cache_layer.element_size(), block_tokens)
    shape: dict[str, Any] = {
        "QUERIES": queries,
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "DIMS": triton.next_power_of_2(head_dim),
        "WINDOW": window or 0,
        "TILE": launch.tile,
    }
    least = triton.cdiv(least, launch.tile)
    # Placeholders: with one split the kernel writes to `out` and does not use `logarithms`.
    partial = out
    logarithms = out
    if splits > 1:
        partial = q.new_empty(sequences * kv_heads * splits * rows, head_dim, dtype=torch.float32)
        logarithms = q.new_empty(len(partial), dtype=torch.float32)
    # Programs start in the order of the grid, splits last. A short context leaves its last splits empty, so the empty
    # programs come at the end and the full ones are spread evenly over the multiprocessors.
    _decode[(kv_heads, sequences, splits)](
        q,
        cache_layer,
        block_tables,
        context_lengths,
        q if scales is None else scales,
        q if sinks is None else sinks,
        partial,
        logarithms,
        math.log2(math.e) / math.sqrt(head_dim),
        q.stride(0),
        block_tables.stride(0),
        *cache_layer.stride()[:3],
        least,
        **shape,
        PAIRS=max(launch.pairs, triton.next_power_of_2(rows)),
        BLOCK=block_tokens,
        SCALED=scales is not None,
        SINKS=sinks is not None,
        CAP=cap or 0.0,
        SPLIT=splits > 1,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **options(q.device),
    )
    if splits > 1:
        combine_splits[(rows, kv_heads, sequences)](
            partial,
            logarithms,
            context_lengths,
            out,
            splits,
            least,
            **shape,
            SPLITS=8 if splits <= 8 else triton.next_power_of_2(splits),  # few variants to compile
            num_warps=2,
            **options(q.device),
        )


@triton.jit
def fp8_queries(queries) -> tl.tensor:
    """Return the queries in the dtype for matmuls with e4m3 keys: fp16 instead of bf16, other dtypes unchanged.

    fp16 represents all e4m3 numbers, and the conversion of the keys is one instruction; to bf16 it takes several.
    """
    if queries.dtype == tl.bfloat16:
        # bf16 has larger numbers than fp16, whose largest is 65504.
        wide = tl.clamp(queries.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        queries = wide.to(tl.float16)
    return queries


@triton.jit
def tile_blocks(table, start, low, end, BLOCK: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """Return the cache blocks of the tile of tokens from `start` on, as int64.

    If a tile lies within one block (TILE divides BLOCK) this is one number, else one number per token, `(TILE,)`.
    Tokens outside [low, end) give block 0.
    """
    if BLOCK % TILE == 0:
        return tl.load(table + start // BLOCK, mask=start < end, other=0).to(tl.int64)
    else:
        position = start + tl.arange(0, TILE)
        # A tile may begin before the window, where blocks are freed, and it may reach past the last block.
        inside = (position >= low) & (position < end)
        return tl.load(table + position // BLOCK, mask=inside, other=0).to(tl.int64)


@triton.jit
def load_tile(
    base,
    blocks,
    start,
    low,
    end,
    block_stride,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Load the tokens `start` to start + TILE - 1 of keys or values, `(TILE, DIMS)`.

    `base` points to the keys or values of this head in block 0. `blocks` is the result of `tile_blocks`. With MASKED,
    tokens outside [low, end) are 0; without it all tokens must be inside.
    """
    token = tl.arange(0, TILE)
    dim = tl.arange(0, DIMS)
    if BLOCK % TILE == 0:
        pointers = base + blocks * block_stride + start % BLOCK * HEAD_DIM
        pointers = pointers + token[:, None] * HEAD_DIM + dim[None, :]
    else:
        pointers = base + (blocks * block_stride + (start + token) % BLOCK * HEAD_DIM)[:, None] + dim[None, :]
    if MASKED:
        inside = ((start + token >= low) & (start + token < end))[:, None]
        return tl.load(pointers, mask=inside & (dim[None, :] < HEAD_DIM) if HEAD_DIM < DIMS else inside, other=0.0)
    elif HEAD_DIM < DIMS:
        return tl.load(pointers, mask=dim[None, :] < HEAD_DIM, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def sink_scores(pointers, used) -> tuple[tl.tensor, tl.tensor]:
    """Return the state of the softmax after each row's sink: its score in base 2, and 1 as the sum of exponentials.

    `pointers` `(PAIRS,)` point to the sink of each row's query head. The sum is relative to the highest score so far, and
    the sink is the only score so far.
    """
    highest = tl.load(pointers, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
    return highest, tl.full(highest.shape, 1.0, tl.float32)


@triton.jit
def capped_scores(scores, scale, CAP: tl.constexpr) -> tl.tensor:
    """Return CAP · tanh(x / CAP) in base 2 for scores x; `scores` · `scale` is x · log2(e)."""
    highest: tl.constexpr = CAP * 1.4426950408889634
    return (2.0 * tl.sigmoid(scores * (2.0 * scale / highest)) - 1.0) * highest


@triton.jit
def split_tiles(
    length, split, splits, least, QUERIES: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first tile of a split, and the first tile after it.

    The tiles that the queries can see are divided into equal parts of at least `least` tiles, at most `splits` parts.
    A split number from the number of parts on gets an empty range: begin == end.

    Example: 10 visible tiles, 4 splits, least = 3 give 3 parts, the tiles [0, 3), [3, 6) and [6, 10). Split 3 is empty.
    """
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - QUERIES - WINDOW + 1, 0) // TILE
    tiles = (length + TILE - 1) // TILE - first
    parts = tl.maximum(tl.minimum(tiles // least, splits), 1)
    return first + tiles * tl.minimum(split, parts) // parts, first + tiles * tl.minimum(split + 1, parts) // parts


@triton.jit(do_not_specialize=["table_stride", "least"], do_not_specialize_on_alignment=["tables", "lengths"])
def _decode(
    q,
    cache,
    tables,
    lengths,
    scales,
    sinks,
    out,
    logarithms,
    scale,
    q_stride,
    table_stride,
    block_stride,
    value_stride,
    head_stride,
    least,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    SINKS: tl.constexpr,
    CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Compute one split of one sequence for one key/value head. Grid: (kv_heads, sequences, splits).

    With SPLIT, `out` is the fp32 buffer `(sequences, kv_heads, splits, QUERIES · GROUP, HEAD_DIM)`, and `logarithms`
    gets the base-2 logsumexp of each row of it. `scale` includes log2(e).
    """
    await_previous(DEPENDENT)
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(0)
    splits = tl.num_programs(2)
    length = tl.load(lengths + sequence)
    begin, end = split_tiles(length, split, splits, least, QUERIES, WINDOW, TILE)
    row = tl.arange(0, PAIRS)
    dim = tl.arange(0, DIMS)
    token = tl.arange(0, TILE)
    used = (row < QUERIES * GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    source = (sequence * QUERIES + row // GROUP).to(tl.int64) * q_stride + (head * GROUP + row % GROUP) * HEAD_DIM
    queries = tl.load(q + source[:, None] + dim[None, :], mask=used, other=0.0)
    position = length - QUERIES + row // GROUP  # the queries are the last QUERIES tokens of the sequence
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - QUERIES - WINDOW + 1, 0)
    table = tables + sequence.to(tl.int64) * table_stride
    keys_begin = cache + head * head_stride
    values_begin = keys_begin + value_stride
    if SCALED:
        scale = scale * tl.load(scales + head)
        queries = fp8_queries(queries)
    # Finite, so that a row without a visible token in a tile gives zeros and not NaN.
    highest = tl.full([PAIRS], -1.0e30, tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    sums = tl.zeros([PAIRS, DIMS], tl.float32)
    if SINKS and split == 0:  # a sink has no value: it only adds to the divisor, and only once, in the first split
        highest, total = sink_scores(sinks + head * GROUP + row % GROUP, row < QUERIES * GROUP)
    # The block numbers are loaded one tile ahead, so that the loads of a tile do not wait for the block table.
    blocks = tile_blocks(table, begin * TILE, low, length, BLOCK, TILE)
    for tile in range(begin, end):
        start = tile * TILE
        keys = load_tile(keys_begin, blocks, start, low, length, block_stride, BLOCK, TILE, HEAD_DIM, DIMS, True)
        values = load_tile(values_begin, blocks, start, low, length, block_stride, BLOCK, TILE, HEAD_DIM, DIMS, True)
        blocks = tile_blocks(table, start + TILE, low, length, BLOCK, TILE)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
        if CAP > 0:
            scores = capped_scores(scores, scale, CAP)
        key = (start + token)[None, :]
        visible = key <= position[:, None]
        if WINDOW > 0:
            visible = visible & (position[:, None] - key < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        factor = 1.0 if CAP > 0 else scale
        higher = tl.maximum(highest, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), sums, input_precision="ieee")
        highest = higher
    # A split without visible tokens for a row has the sum 0; its result is 0.
    divisor = tl.where(total > 0, total, 1.0)
    sums = sums / divisor[:, None]
    if SCALED:
        sums = sums * tl.load(scales + heads + head)
    if SPLIT:
        target = ((sequence * heads + head).to(tl.int64) * splits + split) * (QUERIES * GROUP) + row
        used = used & (begin < end)
        tl.store(logarithms + target, highest + tl.log2(divisor), mask=(row < QUERIES * GROUP) & (begin < end))
    else:
        target = (sequence * QUERIES + row // GROUP).to(tl.int64) * (heads * GROUP) + head * GROUP + row % GROUP
    tl.store(out + target[:, None] * HEAD_DIM + dim[None, :], sums.to(out.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=["splits", "least"], do_not_specialize_on_alignment=["lengths"])
def combine_splits(
    partial,
    logarithms,
    lengths,
    out,
    splits,
    least,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Write the attention of one query head into `out`: the mean of the splits' results, weighted by exp2(logarithms).

    Grid: (QUERIES · GROUP, kv_heads, sequences). `partial` and `logarithms` are what `_decode` stored with SPLIT.
    Empty splits are not read.
    """
    await_previous(DEPENDENT)
    row = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    heads = tl.num_programs(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIMS)
    begin, end = split_tiles(tl.load(lengths + sequence), split, splits, least, QUERIES, WINDOW, TILE)
    # Splits that have tokens. Only their results were stored.
    full = (split < splits) & (begin < end)
    source = ((sequence * heads + head).to(tl.int64) * splits + split) * (QUERIES * GROUP) + row
    logarithm = tl.load(logarithms + source, mask=full, other=-1.0e30)
    weight = tl.where(full, tl.exp2(logarithm - tl.max(logarithm, 0)), 0.0)
    used = full[:, None] & (dim < HEAD_DIM)[None, :]
    sums = tl.load(partial + source[:, None] * HEAD_DIM + dim[None, :], mask=used, other=0.0) * weight[:, None]
    total = tl.sum(weight, 0)
    result = tl.sum(sums, 0) / tl.where(total > 0, total, 1.0)
    target = (sequence * QUERIES + row // GROUP).to(tl.int64) * (heads * GROUP) + head * GROUP + row % GROUP
    tl.store(out + target * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
