"""The Triton kernels of `latent_attention`. Import them only with a CUDA device.

One program computes some heads for one query of a sequence, or for several queries of a chunk. It loops over tiles of
cached tokens and loads each tile once: the latents of a tile are the keys of all heads and also their values.

For decodes the context of a sequence is divided into splits, and a second kernel combines their results. The grid
depends only on the number of sequences and of splits, so that a CUDA graph can be replayed with other context lengths.

The constants of the kernels are:

    PAIRS         pairs (query, head) of a program, at least 16 for the tensor cores
    TILE          cached tokens of a tile
    RANK, DIMS    width of the latent, and this width rounded up to a power of two
    ROTATED, ROTARY_DIMS   width of the rotated part of the key, and this width rounded up to a power of two
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.dependent_launch_triton import options
from meshwright.kernels.paged_decode_triton import (
    AttentionLaunch,
    combine_splits,
    fp8_queries,
    split_tiles,
    tile_blocks,
)
from meshwright.kernels.paged_prefill_triton import MIN_SEQUENCES, find_chunk


def latent_launch(heads: int, itemsize: int, *, chunk: bool) -> AttentionLaunch:
    """Return the launch parameters for queries of `itemsize` bytes; `chunk` for chunks of a prompt, else for decodes.

    fp32 has no tensor cores, so its tiles are small. An instruction of Hopper's tensor cores computes 64 pairs. A decode
    with few heads waits for memory, so many small programs are faster there.
    """
    if itemsize > 2:
        return AttentionLaunch(16, warps=8, stages=1, pairs=16)
    if heads <= 32 and not chunk:
        return AttentionLaunch(32, warps=4, stages=3, pairs=16)
    return AttentionLaunch(32, warps=8, stages=2, pairs=64)


def latent_decode(
    q: Tensor,
    q_rotated: Tensor,
    cache_layer: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    out: Tensor,
    *,
    scale: float,
    splits: int,
    launch: AttentionLaunch | None = None,
) -> None:
    """Write the attention of one query per sequence into `out` `(sequences, heads, rank)`: weighted means of latents.

    q is `(sequences, heads, rank)`; the other tensors are those of `latent_attention`. Scores are multiplied by `scale`.
    Each context is divided into at most `splits` parts, which separate programs compute.
    """
    sequences = len(context_lengths)
    heads, rank = q.shape[1:]
    launch = launch or latent_launch(heads, q.element_size(), chunk=False)
    # Placeholders: with one split the kernel writes to `out` and does not use `logarithms`.
    partial = out
    logarithms = out
    if splits > 1:
        partial = q.new_empty(sequences * splits * heads, rank, dtype=torch.float32)
        logarithms = q.new_empty(len(partial), dtype=torch.float32)
    _decode[(triton.cdiv(heads, launch.pairs), splits, sequences)](
        q,
        q_rotated,
        cache_layer,
        block_tables,
        context_lengths,
        partial,
        logarithms,
        scale * math.log2(math.e),
        *q.stride()[:2],
        *q_rotated.stride()[:2],
        block_tables.stride(0),
        cache_layer.stride(0),
        **_shape(q, q_rotated, cache_layer, launch),
        SPLIT=splits > 1,
    )
    if splits > 1:
        dims = triton.next_power_of_2(rank)
        combine_splits[(heads, 1, sequences)](
            partial,
            logarithms,
            context_lengths,
            out,
            splits,
            1,
            QUERIES=1,
            GROUP=heads,
            HEAD_DIM=rank,
            DIMS=dims,
            WINDOW=0,
            TILE=launch.tile,
            SPLITS=8 if splits <= 8 else triton.next_power_of_2(splits),  # few variants to compile
            num_warps=8 if dims > 256 else 2,
            **options(q.device),
        )


def latent_chunks(
    q: Tensor,
    q_rotated: Tensor,
    cache_layer: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    out: Tensor,
    *,
    queries: int,
    scale: float,
    launch: AttentionLaunch | None = None,
) -> None:
    """Write the attention of chunks of prompts into `out`: weighted means of latents, `(…, heads, rank)`.

    The chunks have `queries` queries together: the rows of q `(…, heads, rank)` from `query_starts[0]` on. The results go
    to the same rows of `out`. The other tensors are those of `latent_attention`.
    """
    sequences = len(context_lengths)
    heads = q.shape[1]
    launch = launch or latent_launch(heads, q.element_size(), chunk=True)
    group = min(heads, launch.pairs)
    _chunks[(triton.cdiv(heads, group), queries // (launch.pairs // group) + sequences)](
        q,
        q_rotated,
        cache_layer,
        block_tables,
        context_lengths,
        query_starts,
        out,
        scale * math.log2(math.e),
        sequences,
        *q.stride()[:2],
        *q_rotated.stride()[:2],
        block_tables.stride(0),
        cache_layer.stride(0),
        **_shape(q, q_rotated, cache_layer, launch),
        SEQUENCES=max(MIN_SEQUENCES, triton.next_power_of_2(sequences)),
        GROUP=group,
    )


def _shape(q: Tensor, q_rotated: Tensor, cache_layer: Tensor, launch: AttentionLaunch) -> dict[str, Any]:
    """Return the constants that both kernels are compiled with."""
    rank = q.shape[2]
    rotated = q_rotated.shape[2]
    return {
        "HEADS": q.shape[1],
        "RANK": rank,
        "DIMS": max(16, triton.next_power_of_2(rank)),
        "ROTATED": rotated,
        "ROTARY_DIMS": max(16, triton.next_power_of_2(rotated)),
        "TILE": launch.tile,
        "PAIRS": launch.pairs,
        "BLOCK": cache_layer.shape[1],
        "SCALED": cache_layer.element_size() == 1,
        "num_warps": launch.warps,
        "num_stages": launch.stages,
    }


@triton.jit
def _load_columns(
    base,
    blocks,
    start,
    length,
    block_stride,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    DIMS: tl.constexpr,
) -> tl.tensor:
    """Load the tokens `start` to start + TILE - 1 of the cache: SIZE numbers of each from `base` on, `(TILE, DIMS)`.

    `blocks` is the result of `tile_blocks`. Tokens from `length` on, and numbers from SIZE on, are 0. WIDTH is the number
    of elements per cached token.
    """
    token = tl.arange(0, TILE)
    dim = tl.arange(0, DIMS)
    if BLOCK % TILE == 0:
        pointers = base + blocks * block_stride + start % BLOCK * WIDTH
        pointers = pointers + token[:, None] * WIDTH + dim[None, :]
    else:
        pointers = base + (blocks * block_stride + (start + token) % BLOCK * WIDTH)[:, None] + dim[None, :]
    used = (start + token < length)[:, None]
    return tl.load(pointers, mask=used & (dim[None, :] < SIZE) if SIZE < DIMS else used, other=0.0)


@triton.jit
def _load_queries(q, offsets, used, SIZE: tl.constexpr, DIMS: tl.constexpr, SCALED: tl.constexpr) -> tl.tensor:
    """Load the queries `(PAIRS, DIMS)` whose first numbers are at q + offsets; with SCALED, in the dtype for fp8 keys."""
    dim = tl.arange(0, DIMS)
    queries = tl.load(q + offsets[:, None] + dim[None, :], mask=used[:, None] & (dim < SIZE)[None, :], other=0.0)
    return fp8_queries(queries) if SCALED else queries


@triton.jit
def _attend(
    queries,
    rotary,
    cache,
    table,
    begin,
    end,
    position,
    length,
    block_stride,
    scale,
    RANK: tl.constexpr,
    DIMS: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTARY_DIMS: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return attention over the tiles `begin` to end - 1 for `queries` `(PAIRS, DIMS)` and `rotary` `(PAIRS, ROTARY_DIMS)`.

    Returns the weighted mean of the latents `(PAIRS, DIMS)`, the highest score `(PAIRS,)` in base 2, and the sum of the
    exponentials relative to that score `(PAIRS,)`. A query sees the tokens up to its `position`; the mean is 0 for a query
    that sees none of these tiles' tokens. `scale` includes log2(e), because the device computes powers of two.
    """
    # Finite, so that a row without a visible token in a tile gives zeros and not NaN.
    highest = tl.full([PAIRS], -1.0e30, tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    sums = tl.zeros([PAIRS, DIMS], tl.float32)
    token = tl.arange(0, TILE)
    width: tl.constexpr = RANK + ROTATED
    # The block numbers are loaded one tile ahead, so that the loads of a tile do not wait for the block table.
    blocks = tile_blocks(table, begin * TILE, 0, length, BLOCK, TILE)
    for tile in range(begin, end):
        start = tile * TILE
        latents = _load_columns(cache, blocks, start, length, block_stride, BLOCK, TILE, width, RANK, DIMS)
        keys = _load_columns(
            cache + RANK, blocks, start, length, block_stride, BLOCK, TILE, width, ROTATED, ROTARY_DIMS
        )
        blocks = tile_blocks(table, start + TILE, 0, length, BLOCK, TILE)
        latents = latents.to(queries.dtype)
        scores = tl.dot(rotary, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
        scores = tl.dot(queries, tl.trans(latents), scores, input_precision="ieee")
        scores = tl.where((start + token)[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(queries.dtype), latents, sums, input_precision="ieee")
        highest = higher
    total = tl.where(total > 0, total, 1.0)
    return sums / total[:, None], highest, total


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "lengths"])
def _decode(
    q,
    q_rotated,
    cache,
    tables,
    lengths,
    out,
    logarithms,
    scale,
    q_stride,
    q_head_stride,
    rotary_stride,
    rotary_head_stride,
    table_stride,
    block_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    DIMS: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTARY_DIMS: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Compute one split of one sequence's context for PAIRS heads. Grid: (parts of the heads, splits, sequences).

    With SPLIT, `out` is the fp32 buffer `(sequences, splits, heads, RANK)` and `logarithms` `(sequences, splits, heads)`
    gets the base-2 logsumexp of each split; `combine_splits` combines them.
    """
    part = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    splits = tl.num_programs(1)
    dim = tl.arange(0, DIMS)
    head = part * PAIRS + tl.arange(0, PAIRS)
    used = head < HEADS
    long_sequence = sequence.to(tl.int64)
    length = tl.load(lengths + sequence)
    begin, end = split_tiles(length, split, splits, 1, 1, 0, TILE)
    offsets = long_sequence * q_stride + head.to(tl.int64) * q_head_stride
    rotary_offsets = long_sequence * rotary_stride + head.to(tl.int64) * rotary_head_stride
    queries = _load_queries(q, offsets, used, RANK, DIMS, SCALED)
    rotary = _load_queries(q_rotated, rotary_offsets, used, ROTATED, ROTARY_DIMS, SCALED)
    table = tables + long_sequence * table_stride
    # The only query of a sequence is at its last token.
    position = tl.full([PAIRS], 0, tl.int32) + length - 1
    mean, highest, total = _attend(
        queries,
        rotary,
        cache,
        table,
        begin,
        end,
        position,
        length,
        block_stride,
        scale,
        RANK,
        DIMS,
        ROTATED,
        ROTARY_DIMS,
        TILE,
        PAIRS,
        BLOCK,
    )
    target = long_sequence * HEADS + head
    if SPLIT:
        target = (long_sequence * splits + split) * HEADS + head
        used = used & (begin < end)
        tl.store(logarithms + target, highest + tl.log2(total), mask=used)
    tl.store(
        out + target[:, None] * RANK + dim[None, :],
        mean.to(out.dtype.element_ty),
        mask=used[:, None] & (dim < RANK)[None, :],
    )


@triton.jit(
    do_not_specialize=["sequences", "table_stride"], do_not_specialize_on_alignment=["tables", "lengths", "starts"]
)
def _chunks(
    q,
    q_rotated,
    cache,
    tables,
    lengths,
    starts,
    out,
    scale,
    sequences,
    q_stride,
    q_head_stride,
    rotary_stride,
    rotary_head_stride,
    table_stride,
    block_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    DIMS: tl.constexpr,
    ROTATED: tl.constexpr,
    ROTARY_DIMS: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    SEQUENCES: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Compute PAIRS pairs (query, head) of one chunk. Grid: (parts of the heads, parts of the queries).

    The program finds its sequence with `find_chunk`. GROUP is the number of heads in a program.
    """
    part: tl.constexpr = PAIRS // GROUP
    # The last queries of a prompt see the most tokens. Their programs start first, so that none of them ends late.
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, query_begin, count, first = find_chunk(starts, sequences, number, part, SEQUENCES)
    if first >= count:
        return
    length = tl.load(lengths + sequence)
    pair = tl.arange(0, PAIRS)
    dim = tl.arange(0, DIMS)
    query = first + pair // GROUP
    head = tl.program_id(0) * GROUP + pair % GROUP
    used = (pair < part * GROUP) & (query < count) & (head < HEADS)
    source = (query_begin + query).to(tl.int64)
    long_head = head.to(tl.int64)
    queries = _load_queries(q, source * q_stride + long_head * q_head_stride, used, RANK, DIMS, SCALED)
    rotary_offsets = source * rotary_stride + long_head * rotary_head_stride
    rotary = _load_queries(q_rotated, rotary_offsets, used, ROTATED, ROTARY_DIMS, SCALED)
    table = tables + sequence.to(tl.int64) * table_stride
    position = length - count + query
    # Position of the last query of this program; it needs the tiles up to this position.
    last = length - count + tl.minimum(first + part, count) - 1
    mean, _, _ = _attend(
        queries,
        rotary,
        cache,
        table,
        0,
        (last + TILE) // TILE,
        position,
        length,
        block_stride,
        scale,
        RANK,
        DIMS,
        ROTATED,
        ROTARY_DIMS,
        TILE,
        PAIRS,
        BLOCK,
    )
    target = (source * HEADS + head)[:, None] * RANK + dim[None, :]
    tl.store(out + target, mean.to(out.dtype.element_ty), mask=used[:, None] & (dim < RANK)[None, :])
