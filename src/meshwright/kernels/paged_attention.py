"""Attention over a paged key/value cache: writes of new keys and values, and attention of one step's queries.

The cache of a group of layers is one tensor `(blocks, layers, 2, kv_heads, tokens, head_dim)`: index 0 of the third
dimension has the keys, rotated, and index 1 the values. `cache_layer` is `cache[:, layer]`, a strided view. The slot of
a token in the cache is `block * tokens + offset`. Sequence s of a step has the queries `query_starts[s]` to
`query_starts[s + 1] - 1`; they are the last ones of its `context_lengths[s]` tokens, whose keys and values are in the
blocks `block_tables[s]`.

On CUDA, Triton kernels run; elsewhere, and with `reference`, torch's operators gather the blocks of each sequence in turn.
An fp8 cache has `scales` `(2, kv_heads)` in fp32: a stored number times its scale is the key or value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.kernels.attention import AttentionMask, attention
from meshwright.kernels.norm import HeadNorms, accumulate_dtype, rms_norm
from meshwright.kernels.rope import RotaryTables, rotate, rotate_neighbours

PROGRAMS_PER_PROCESSOR = 4
"""Programs of the decode kernel that each multiprocessor should get at least, if contexts are long."""
MAX_SPLITS = 32
"""Maximum number of parts of a context: the second kernel reads the results of all."""
MIN_SPLIT_TOKENS = 64
"""Fewest tokens of a part: one tile."""
FULL_SHARE = 0.95
"""From so many programs per multiprocessor on, counted with undivided contexts, only long contexts are divided."""
PART_TOKENS = {1: (272, 272), 2: (480, 1536)}
"""Fewest tokens of a part, by the bytes of a cached number: below FULL_SHARE, and from it on.

They are for one program per multiprocessor, counted with undivided contexts; with n programs n times as many. Found by trial on an H200
with contexts of 1,056 tokens. A program converts fp8 numbers itself, so fp8 needs more programs than bf16 to reach the memory's bandwidth.
"""
LARGE_TILES = ((0.95, 1.75), (2.5, 3.0))
"""Ranges of programs per multiprocessor in which large tiles of bf16 are faster: one or two such programs then fill each."""
INVARIANT_SPLITS = 16
"""Maximum number of parts of a context in invariant mode. Its own length alone decides how many it has."""
INVARIANT_PART = 256
"""Fewest tokens of a part in invariant mode."""


def write_cache(
    k: Tensor, v: Tensor, cache_layer: Tensor, slots: Tensor, *, scales: Tensor | None = None, reference: bool = False
) -> None:
    """Write k and v `(tokens, kv_heads, head_dim)` into the `slots` `(tokens,)` of `cache_layer`; negative slots are skipped."""
    if runs_kernels(k, reference):
        from meshwright.kernels.cache_write_triton import rotate_write

        rotate_write(k, k, v, None, slots, cache_layer, slots, None, None, scales)
        return
    block_tokens = cache_layer.shape[3]
    cached = slots >= 0
    slots = slots[cached].long()
    for index, x in enumerate((k, v)):
        stored = _store(x[cached], None if scales is None else scales[index], cache_layer.dtype)
        # Bytes, because torch has no indexed write of fp8.
        target = cache_layer.view(torch.uint8) if is_fp8(cache_layer) else cache_layer
        stored = stored.view(torch.uint8) if is_fp8(cache_layer) else stored
        target[slots // block_tokens, index, :, slots % block_tokens] = stored


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: RotaryTables | None,
    positions: Tensor,
    cache_layer: Tensor,
    slots: Tensor,
    *,
    scales: Tensor | None = None,
    rotated_keys: Tensor | None = None,
    norms: HeadNorms | None = None,
    neighbours: bool = False,
    reference: bool = False,
) -> Tensor:
    """Return q rotated to `positions` `(tokens,)`, and write k, rotated, and v into the `slots` of `cache_layer`.

    q is `(tokens, heads, head_dim)`, k and v are `(tokens, kv_heads, head_dim)`. `tables` are cosines and sines, each
    `(max_positions, width / 2)`, of heads that are rotated over their first `width` dimensions; None means a model without rotary
    embedding. Negative slots are skipped. The rotated keys are also written into `rotated_keys`, shaped like k, if given. Rotation and
    rounding are those of `rope.rotate`, with `neighbours` those of `rope.rotate_neighbours`. With `norms` heads of q and k are normed
    first.
    """
    if runs_kernels(q, reference):
        from meshwright.kernels.cache_write_triton import rotate_write

        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        rotate_write(
            q, k, v, tables, positions, cache_layer, slots, out, rotated_keys, scales, norms, neighbours=neighbours
        )
        return out
    if norms is not None:
        q = rms_norm(q, norms.query, norms.eps, plus_one=norms.plus_one, reference=reference)
        k = rms_norm(k, norms.key, norms.eps, plus_one=norms.plus_one, reference=reference)
    if tables is not None:
        cos, sin = tables
        step_tables = cos[positions][:, None], sin[positions][:, None]
        turn = rotate_neighbours if neighbours else rotate
        q = turn(q, step_tables)
        k = turn(k, step_tables)
    if rotated_keys is not None:
        rotated_keys.copy_(k)
    write_cache(k, v, cache_layer, slots, scales=scales, reference=reference)
    return q


def paged_attention(
    q: Tensor,
    cache_layer: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    *,
    decodes: int = 0,
    decode_queries: int = 1,
    window: int | None = None,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
    invariant: bool = False,
    reference: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of q `(queries, heads, head_dim)` over the cache; the result is shaped like q and contiguous.

    `block_tables` is `(sequences, max_blocks)`, `context_lengths` `(sequences,)`, `query_starts` `(sequences + 1,)`, all int32. The first
    `decodes` sequences have `decode_queries` queries each: a kernel for few queries computes them. `window` is the number of tokens
    that a query attends to, itself included; blocks before the window are not read. Queries before a sequence's first token, as all of
    context length 0, are padding: their results are 0. `sinks` `(heads,)` and `cap` are those of `kernels.attention`.
    With `invariant` the bits of a sequence's result do not depend on the other sequences. The result is written into `out`, contiguous,
    if given.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if runs_kernels(q, reference):
        step = (cache_layer, block_tables, context_lengths, query_starts)
        _attend_by_kernels(q, *step, out, decodes, decode_queries, window, scales, sinks, cap, invariant)
        return out
    out.zero_()
    starts = query_starts.tolist()
    lengths = context_lengths.tolist()
    for sequence, length in enumerate(lengths):
        queries = slice(max(starts[sequence], starts[sequence + 1] - length), starts[sequence + 1])
        count = queries.stop - queries.start
        if count == 0:
            continue
        first = 0 if window is None else max(0, length - count - window + 1)
        k, v = _gather(cache_layer, block_tables[sequence], first, length, scales, q.dtype)
        mask = visible_keys(count, k.shape[0], window, q.device, cap)
        out[queries] = attention(q[queries][None], k[None], v[None], mask, sinks=sinks, reference=reference)[0]
    return out


def prompt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    out: Tensor,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
    reference: bool = False,
) -> None:
    """Causal attention within prompts of `lengths` tokens into `out`, from the step's own q, k and v.

    The cache is not read; k is rotated. q and `out` are `(tokens, heads, head_dim)`, k and v are `(tokens, kv_heads, head_dim)`. Each
    prompt is a call of the trainer's attention.
    """
    start = 0
    for length in lengths:
        tokens = slice(start, start + length)
        mask = visible_keys(length, length, window, q.device, cap)
        out[tokens] = attention(
            q[tokens][None], k[tokens][None], v[tokens][None], mask, sinks=sinks, reference=reference
        )[0]
        start += length


def decode_splits(programs: int, tokens: int, processors: int, *, invariant: bool = False) -> int:
    """Number of parts into which the decode kernel divides a context of up to `tokens` tokens.

    `programs` is the number of pairs (sequence, key/value head). The parts give each of the `processors` (multiprocessors) of the GPU
    several programs, because one alone has too few loads in flight for the memory bandwidth. With `invariant` it is the most that a context
    of so many tokens can have, so that fewer programs find nothing to do.
    """
    if invariant:
        return max(1, min(INVARIANT_SPLITS, -(-tokens // INVARIANT_PART)))
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // programs)
    return max(1, min(wanted, MAX_SPLITS, -(-tokens // MIN_SPLIT_TOKENS)))


def part_tokens(programs: int, processors: int, itemsize: int = 2) -> int:
    """Fewest tokens of a part, if a context has several: with smaller parts the cache would be read no faster.

    `programs` is as in `decode_splits`, `itemsize` the bytes of a cached number. The kernel divides each context by its own length, so
    long ones have more parts. Example: 32 sequences with 4 key/value heads in bf16 on 132 multiprocessors have 128 programs, 0.97 each; a
    part has at least 1536 · 128 / 132 = 1489 tokens, so contexts below 2,978 tokens are not divided.
    """
    few, full = PART_TOKENS[min(itemsize, 2)]
    return max(1, (full if programs >= FULL_SHARE * processors else few) * programs // processors)


def _attend_by_kernels(
    q: Tensor,
    cache_layer: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    out: Tensor,
    decodes: int,
    decode_queries: int,
    window: int | None,
    scales: Tensor | None,
    sinks: Tensor | None,
    cap: float | None,
    invariant: bool,
) -> None:
    """`paged_attention` by the Triton kernels: one for the first `decodes` sequences, another for the chunks behind them."""
    from meshwright.kernels.paged_decode_triton import decode_launch, paged_decode
    from meshwright.kernels.paged_prefill_triton import paged_prefill

    rows = decodes * decode_queries
    if decodes:
        tokens = block_tables.shape[1] * cache_layer.shape[3]
        block = cache_layer.shape[3]
        tokens = tokens if window is None else min(tokens, window + decode_queries)
        programs = decodes * cache_layer.shape[2]
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        splits = decode_splits(programs, tokens, processors, invariant=invariant)
        least = INVARIANT_PART
        large = any(low <= programs / processors < high for low, high in LARGE_TILES)
        if not invariant:
            least = part_tokens(programs, processors, cache_layer.element_size())
            splits = min(splits, max(1, tokens // least))
        launch = decode_launch(q.shape[2], cache_layer.element_size(), block, small=not (invariant or large))
        step = (cache_layer, block_tables[:decodes], context_lengths[:decodes])
        options = {"queries": decode_queries, "splits": splits, "least": least, "window": window, "scales": scales}
        paged_decode(q, *step, out, **options, sinks=sinks, cap=cap, launch=launch)
    if q.shape[0] > rows:
        step = (cache_layer, block_tables[decodes:], context_lengths[decodes:], query_starts[decodes:])
        paged_prefill(q, *step, out, queries=q.shape[0] - rows, window=window, scales=scales, sinks=sinks, cap=cap)


def runs_kernels(x: Tensor, reference: bool) -> bool:
    """Whether Triton kernels compute operations on x."""
    return x.is_cuda and x.element_size() <= 4 and not reference


def _gather(
    cache_layer: Tensor, table: Tensor, first: int, length: int, scales: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens `first` to `length` - 1 of a sequence, each `(length - first, kv_heads, head_dim)`."""
    block_tokens = cache_layer.shape[3]
    first_block = first // block_tokens
    table = table[first_block : -(-length // block_tokens)].long()
    source = cache_layer.view(torch.uint8) if is_fp8(cache_layer) else cache_layer
    stored = source[table].view(cache_layer.dtype)
    inside = slice(first - first_block * block_tokens, length - first_block * block_tokens)
    k, v = (stored[:, index].transpose(1, 2).flatten(0, 1)[inside] for index in (0, 1))
    if scales is None:
        return k, v
    return (k.float() * scales[0, :, None]).to(dtype), (v.float() * scales[1, :, None]).to(dtype)


def visible_keys(
    queries: int, keys: int, window: int | None, device: torch.device, cap: float | None = None
) -> AttentionMask | None:
    """The mask of the last `queries` of `keys` tokens, with a `cap` of scores.

    None if there is no cap, the queries are all of the tokens, and each attends to all earlier ones.
    """
    if cap is None and queries == keys and (window is None or window >= keys):
        return None
    position = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    visible = key <= position
    visible = visible if window is None else visible & (position - key < window)
    return AttentionMask(dense=visible[None, None], cap=cap)


def _store(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x `(tokens, kv_heads, head_dim)` in `dtype`: for fp8 divided by `scale` `(kv_heads,)` and limited to its range."""
    if scale is None:
        return x.to(dtype)
    return limited(x.to(accumulate_dtype(x.dtype)) / scale[:, None], dtype)


def limited(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in an fp8 `dtype`, limited to its range."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def is_fp8(x: Tensor) -> bool:
    """Whether x has numbers of one byte."""
    return x.dtype.itemsize == 1
