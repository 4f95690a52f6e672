"""Multi-head latent attention over a paged cache, in the absorbed form: cache writes, and attention of a step's queries.

The cache of a group of layers is one tensor `(blocks, layers, tokens, rank + rotated)`. Each cached token has a latent
(`rank` numbers) and then the rotated part of its key (`rotated` numbers). `cache_layer` is `cache[:, layer]`, a strided
view `(blocks, tokens, rank + rotated)`. All heads attend to the same numbers: the latent is part of the key, and it is
also the value. Slots, block tables and sequences are those of `paged_attention`. In an fp8 cache (e4m3), magnitudes
above 448 become 448.

On CUDA, Triton kernels run. Elsewhere, and with `reference`, torch gathers the blocks of one sequence after another.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.kernels.attention import attention
from meshwright.kernels.paged_attention import decode_splits, is_fp8, limited, runs_kernels, visible_keys
from meshwright.kernels.rope import RotaryTables, rotate_neighbours


def rotate_and_write_latents(
    q: Tensor,
    key: Tensor,
    latent: Tensor,
    tables: RotaryTables,
    positions: Tensor,
    cache_layer: Tensor,
    slots: Tensor,
    *,
    reference: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return q and key rotated to `positions`, and write latent and rotated key into the `slots` of `cache_layer`.

    `q` `(tokens, heads, rotated)`: the part of the queries that is rotated.
    `key` `(tokens, rotated)`: the part of the keys that is rotated, shared by all heads.
    `latent` `(tokens, rank)`. `positions` `(tokens,)`.
    `tables`: cosines and sines, each `(max_positions, rotated / 2)`.
    `slots` `(tokens,)`: index of each token in the cache; a token with a negative slot is not written.

    Rotation and rounding are those of `rope.rotate_neighbours`. The results have the shapes of q and key.
    """
    if runs_kernels(q, reference):
        from meshwright.kernels.latent_write_triton import rotate_write_latents

        out = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(key.shape)
        rotate_write_latents(q, key, latent, tables, positions, cache_layer, slots, *out)
        return out
    cos, sin = tables
    step_tables = cos[positions][:, None], sin[positions][:, None]
    q = rotate_neighbours(q, step_tables)
    key = rotate_neighbours(key[:, None], step_tables)[:, 0]
    cached = slots >= 0
    slots = slots[cached].long()
    rows = torch.cat((latent, key), dim=-1)[cached]
    block_tokens = cache_layer.shape[1]
    target = cache_layer
    if is_fp8(cache_layer):
        # As bytes, because torch has no indexed write of fp8.
        rows = limited(rows, cache_layer.dtype).view(torch.uint8)
        target = cache_layer.view(torch.uint8)
    target[slots // block_tokens, slots % block_tokens] = rows
    return q, key


def latent_attention(
    q: Tensor,
    q_rotated: Tensor,
    cache_layer: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    decodes: int = 0,
    reference: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return the causal attention of absorbed queries over the cache: weighted means of latents `(queries, heads, rank)`.

    `q` `(queries, heads, rank)` and `q_rotated` `(queries, heads, rotated)`: the two parts of the queries.
    `block_tables` `(sequences, max_blocks)`, `context_lengths` `(sequences,)`, `query_starts` `(sequences + 1,)`: int32.
    `scale`: multiplies the scores.
    `decodes`: the first `decodes` sequences have one query each.
    `out`: a contiguous tensor for the result, or None.

    A sequence may have more queries than its context length, for example when that is 0. The first ones of its
    queries are then padding, and their results are 0. The result is contiguous.
    """
    out = q.new_empty(q.shape) if out is None else out
    if runs_kernels(q, reference):
        step = (cache_layer, block_tables, context_lengths, query_starts)
        _attend_by_kernels(q, q_rotated, *step, out, scale, decodes)
        return out
    rank = q.shape[2]
    block_tokens = cache_layer.shape[1]
    out.zero_()
    source = cache_layer.view(torch.uint8) if is_fp8(cache_layer) else cache_layer
    # `attention` divides scores by the root of the key's width, so the queries are multiplied by it.
    both = torch.cat((q, q_rotated), dim=-1) * (scale * math.sqrt(cache_layer.shape[2]))
    starts = query_starts.tolist()
    lengths = context_lengths.tolist()
    for sequence, length in enumerate(lengths):
        queries = slice(max(starts[sequence], starts[sequence + 1] - length), starts[sequence + 1])
        count = queries.stop - queries.start
        if count == 0:
            continue
        blocks = block_tables[sequence, : -(-length // block_tokens)].long()
        rows = source[blocks].view(cache_layer.dtype).flatten(0, 1)[:length, None].to(q.dtype)
        mask = visible_keys(count, length, None, q.device)
        out[queries] = attention(both[queries][None], rows[None], rows[None], mask, reference=reference)[0, ..., :rank]
    return out


def _attend_by_kernels(
    q: Tensor,
    q_rotated: Tensor,
    cache_layer: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    query_starts: Tensor,
    out: Tensor,
    scale: float,
    decodes: int,
) -> None:
    """Compute `latent_attention` with two Triton kernels: one for the first `decodes` sequences, one for the rest (chunks)."""
    from meshwright.kernels.latent_attention_triton import latent_chunks, latent_decode, latent_launch

    heads = q.shape[1]
    if decodes:
        splits = decode_splits(
            decodes * -(-heads // latent_launch(heads, q.element_size(), chunk=False).pairs),
            block_tables.shape[1] * cache_layer.shape[1],
            torch.cuda.get_device_properties(q.device).multi_processor_count,
        )
        step = (cache_layer, block_tables[:decodes], context_lengths[:decodes])
        latent_decode(q, q_rotated, *step, out, scale=scale, splits=splits)
    if q.shape[0] > decodes:
        step = (cache_layer, block_tables[decodes:], context_lengths[decodes:], query_starts[decodes:])
        latent_chunks(q, q_rotated, *step, out, queries=q.shape[0] - decodes, scale=scale)
