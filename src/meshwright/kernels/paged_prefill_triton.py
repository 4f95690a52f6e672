"""The Triton kernel of `paged_attention` for chunks of prompts. Import it only with a CUDA device.

One program computes all query heads of one key/value head for several consecutive queries of a sequence. It loops over
the cached tokens from the first visible one on. Tiles of tokens begin at multiples of TILE and are added in ascending
order. So the bits of a query's result do not depend on where its chunk begins.

The constants are those of `paged_decode_triton`.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from meshwright.kernels.paged_decode_triton import (
    AttentionLaunch,
    capped_scores,
    fp8_queries,
    load_tile,
    sink_scores,
    tile_blocks,
)

MIN_SEQUENCES = 256
"""Least size of the table in which a program searches its sequence. Most batches have fewer sequences, so that one
compiled variant serves them all."""


def prefill_launch(head_dim: int, itemsize: int) -> AttentionLaunch:
    """Return the launch parameters for queries of `itemsize` bytes. fp32 has no tensor cores, so its tiles are small."""
    wide = head_dim > 128
    if itemsize > 2:
        return AttentionLaunch(16, warps=4, stages=1, pairs=16 if wide else 32)
    return AttentionLaunch(32 if wide else 64, warps=8, stages=2 if wide else 3, pairs=128)


def paged_prefill(
    q: Tensor,
    cache_layer: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    out: Tensor,
    *,
    queries: int,
    window: int | None,
    scales: Tensor | None,
    sinks: Tensor | None = None,
    cap: float | None = None,
    launch: AttentionLaunch | None = None,
) -> None:
    """Write the attention of chunks of prompts into `out`.

    The chunks have `queries` queries together: the rows of q `(…, heads, head_dim)` from `query_starts[0]` on. The results
    go to the same rows of `out`. The options are those of `paged_decode_triton.paged_decode`.
    """
    sequences = len(context_lengths)
    heads, head_dim = q.shape[1:]
    kv_heads = cache_layer.shape[2]
    launch = launch or prefill_launch(head_dim, q.element_size())
    group = heads // kv_heads
    # 128 pairs are two instructions of Hopper's tensor cores.
    rows = max(launch.pairs, triton.next_power_of_2(group))
    _prefill[(kv_heads, queries // (rows // group) + sequences)](
        q,
        cache_layer,
        block_tables,
        context_lengths,
        query_starts,
        q if scales is None else scales,
        q if sinks is None else sinks,
        out,
        math.log2(math.e) / math.sqrt(head_dim),
        sequences,
        q.stride(0),
        block_tables.stride(0),
        *cache_layer.stride()[:3],
        SEQUENCES=max(MIN_SEQUENCES, triton.next_power_of_2(sequences)),
        GROUP=group,
        HEAD_DIM=head_dim,
        DIMS=triton.next_power_of_2(head_dim),
        WINDOW=window or 0,
        TILE=launch.tile,
        PAIRS=rows,
        BLOCK=cache_layer.shape[3],
        SCALED=scales is not None,
        SINKS=sinks is not None,
        CAP=cap or 0.0,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


@triton.jit
def find_chunk(
    starts, sequences, number, part: tl.constexpr, SEQUENCES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return which queries the program `number` computes: (sequence, query_begin, count, first).

    `query_begin` is the row of the sequence's first query in q, and `count` the number of its queries. The program computes
    `part` queries from the sequence's query `first` on. If first >= count there is nothing left to compute.

    A sequence gets one program per `part` queries, rounded up, and sometimes one more that has nothing to do. So the grid
    is known without reading `starts`: queries // part + sequences programs.
    """
    # first_program[s] = (queries before sequence s) // part + s. It grows by at least ⌈count / part⌉ from s to s + 1.
    # Example with part = 4 and chunks of 5, 3 and 8 queries: `begins` is 0, 5, 8 and `first_program` 0, 2, 4. Programs 0 and 1
    # compute the first sequence (queries 0 to 3, and 4), program 2 the second; program 3 has nothing to do.
    candidate = tl.arange(0, SEQUENCES)
    begins = tl.load(starts + candidate, mask=candidate < sequences, other=0)
    first_program = (begins - tl.load(starts)) // part + candidate
    sequence = tl.sum(((candidate < sequences) & (first_program <= number)).to(tl.int32), 0) - 1
    query_begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - query_begin
    first = (number - ((query_begin - tl.load(starts)) // part + sequence)) * part
    return sequence, query_begin, count, first


@triton.jit
def _attend(
    sums,
    highest,
    total,
    queries,
    begin,
    end,
    position,
    low,
    length,
    keys_begin,
    value_stride,
    table,
    block_stride,
    scale,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the tiles `begin` to end - 1 to the running softmax (sums, highest, total), and return it.

    `sums` `(PAIRS, DIMS)`: weighted values. `highest` `(PAIRS,)`: the highest score in base 2. `total` `(PAIRS,)`: the sum
    of the exponentials relative to it. MASKED is needed where some query does not see every token of the tiles.
    """
    token = tl.arange(0, TILE)
    blocks = tile_blocks(table, begin * TILE, low, length, BLOCK, TILE)
    for tile in range(begin, end):
        start = tile * TILE
        keys = load_tile(keys_begin, blocks, start, low, length, block_stride, BLOCK, TILE, HEAD_DIM, DIMS, MASKED)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
        if CAP > 0:
            scores = capped_scores(scores, scale, CAP)
        if MASKED:
            key = (start + token)[None, :]
            visible = key <= position[:, None]
            if WINDOW > 0:
                visible = visible & (position[:, None] - key < WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        # The operations are the same with and without a mask, so that both round alike.
        factor = 1.0 if CAP > 0 else scale
        higher = tl.maximum(highest, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        values = load_tile(
            keys_begin + value_stride, blocks, start, low, length, block_stride, BLOCK, TILE, HEAD_DIM, DIMS, MASKED
        )
        blocks = tile_blocks(table, start + TILE, low, length, BLOCK, TILE)
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), sums, input_precision="ieee")
        highest = higher
    return sums, highest, total


@triton.jit(
    do_not_specialize=["sequences", "table_stride"], do_not_specialize_on_alignment=["tables", "lengths", "starts"]
)
def _prefill(
    q,
    cache,
    tables,
    lengths,
    starts,
    scales,
    sinks,
    out,
    scale,
    sequences,
    q_stride,
    table_stride,
    block_stride,
    value_stride,
    head_stride,
    SEQUENCES: tl.constexpr,
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
) -> None:
    """Compute `part` queries of one sequence for one key/value head. Grid: (kv_heads, parts of the queries).

    The visible tiles have three ranges: tiles that the window's lower end cuts (masked), tiles that every query sees
    fully (without mask, faster), and tiles that the causal limit cuts (masked).
    """
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    part: tl.constexpr = PAIRS // GROUP
    # The last queries of a prompt see the most tokens. Their programs start first, so that none of them ends late.
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, query_begin, count, first = find_chunk(starts, sequences, number, part, SEQUENCES)
    if first >= count:
        return
    length = tl.load(lengths + sequence)
    row = tl.arange(0, PAIRS)
    dim = tl.arange(0, DIMS)
    query = first + row // GROUP
    used = ((row < part * GROUP) & (query < count))[:, None] & (dim < HEAD_DIM)[None, :]
    source = (query_begin + query).to(tl.int64)
    head_offset = (head * GROUP + row % GROUP) * HEAD_DIM
    queries = tl.load(q + (source * q_stride + head_offset)[:, None] + dim[None, :], mask=used, other=0.0)
    position = length - count + query
    # `lowest` and `last` are the positions of the first and the last query of this program.
    lowest = length - count + first
    last = length - count + tl.minimum(first + part, count) - 1
    end = (last + TILE) // TILE
    table = tables + sequence.to(tl.int64) * table_stride
    keys_begin = cache + head * head_stride
    if SCALED:
        scale = scale * tl.load(scales + head)
        queries = fp8_queries(queries)
    highest = tl.full([PAIRS], -1.0e30, tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    sums = tl.zeros([PAIRS, DIMS], tl.float32)
    if SINKS:
        highest, total = sink_scores(sinks + head * GROUP + row % GROUP, row < part * GROUP)
    begin = 0
    low = 0
    # Tiles before `full_end` have only tokens up to `lowest`, which all queries see.
    full_end = (lowest + 1) // TILE
    if WINDOW > 0:
        low = tl.maximum(lowest - WINDOW + 1, 0)
        begin = low // TILE
        # Tiles from `full_begin` on lie within the window of all queries.
        full_begin = tl.maximum(tl.minimum((tl.maximum(last - WINDOW + 1, 0) + TILE - 1) // TILE, full_end), begin)
        sums, highest, total = _attend(
            sums,
            highest,
            total,
            queries,
            begin,
            full_begin,
            position,
            low,
            length,
            keys_begin,
            value_stride,
            table,
            block_stride,
            scale,
            HEAD_DIM,
            DIMS,
            WINDOW,
            TILE,
            BLOCK,
            CAP,
            True,
        )
        begin = full_begin
        full_end = tl.maximum(full_end, begin)
    sums, highest, total = _attend(
        sums,
        highest,
        total,
        queries,
        begin,
        full_end,
        position,
        low,
        length,
        keys_begin,
        value_stride,
        table,
        block_stride,
        scale,
        HEAD_DIM,
        DIMS,
        WINDOW,
        TILE,
        BLOCK,
        CAP,
        False,
    )
    sums, highest, total = _attend(
        sums,
        highest,
        total,
        queries,
        full_end,
        end,
        position,
        low,
        length,
        keys_begin,
        value_stride,
        table,
        block_stride,
        scale,
        HEAD_DIM,
        DIMS,
        WINDOW,
        TILE,
        BLOCK,
        CAP,
        True,
    )
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    if SCALED:
        sums = sums * tl.load(scales + heads + head)
    target = source * (heads * GROUP * HEAD_DIM) + head_offset
    tl.store(out + target[:, None] + dim[None, :], sums.to(out.dtype.element_ty), mask=used)
