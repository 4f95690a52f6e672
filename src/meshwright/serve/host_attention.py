"""Attention of decodes on a CPU: one token of each request attends to the paged cache. All requests are computed in one matmul.

The reference implementation loops over the requests, and computes indices again in every layer. For a small model this would take longer
than the matmuls. So here the indices of a step are computed once, and all layers of a group share them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.loss import capped
from meshwright.kernels.rope import RotaryTables
from meshwright.kernels.sinks import softmax_with_sinks
from meshwright.serve.batch_inputs import StepInputs


class HostDecodes(NamedTuple):
    """Indices, rotary tables and mask of a step of decodes. All layers of one group share them."""

    rope: RotaryTables | None
    """Cosines and signed sines for the new token of each request, each `(sequences, 1, head_dim)`. None without rotation."""
    blocks: Tensor
    """`(sequences,)` int64: the cache block of each new token."""
    offsets: Tensor
    """`(sequences,)` int64: the index of each new token in its block."""
    table: Tensor
    """`(sequences · columns,)` int64: the blocks that are read, request after request."""
    first: int
    """Index of the first token that is read, among the tokens of a request's blocks in `table`. It is above 0 only for a single request."""
    length: int
    """Index after the last token that is read."""
    mask: Tensor | None
    """`(sequences, 1, 1, tokens)` bool: the tokens that each request reads. None for a single request, which reads all of them."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_layer: Tensor,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Write k and v into the cache, then return the attention of q, `(sequences, heads, head_dim)` like q.

        k and v are `(sequences, kv_heads, head_dim)`; `cache_layer` is `(blocks, 2, kv_heads, tokens, head_dim)`. `sinks` and `cap` are as
        in `kernels.attention`.
        """
        sequences, heads, width = q.shape
        if self.rope is not None:
            both = torch.cat((q, k), dim=1)
            both = torch.addcmul(both * self.rope[0], both.roll(width // 2, -1), self.rope[1])
            q = both[:, :heads]
            k = both[:, heads:]
        torch.ops.aten.index_put_(cache_layer, [self.blocks, None, None, self.offsets], torch.stack((k, v), dim=1))
        stored = cache_layer.index_select(0, self.table)
        _, _, kv_heads, block_tokens, _ = stored.shape
        stored = stored.view(sequences, -1, 2, kv_heads, block_tokens, width).permute(2, 0, 3, 1, 4, 5)
        keys, values = stored.reshape(2, sequences, kv_heads, -1, width)[..., self.first : self.length, :]
        # The query heads that share keys and values are rows of one matmul.
        q = q.reshape(sequences, kv_heads, heads // kv_heads, width)
        if sinks is None and cap is None:
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask).view(sequences, heads, width)
        scores = capped(q @ keys.mT / math.sqrt(width), cap)
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, float("-inf"))
        sinks = None if sinks is None else sinks.view(kv_heads, -1)
        return (softmax_with_sinks(scores, sinks) @ values).view(sequences, heads, width)

    def attend_latents(self, q: Tensor, cache_layer: Tensor, scale: float) -> Tensor:
        """Return the attention-weighted sums of cached rows for q, `(sequences, heads, width)` like q.

        The new tokens must be in the cache already. `cache_layer` is `(blocks, tokens, width)`. Attention scores are multiplied by `scale`.
        """
        rows = cache_layer.index_select(0, self.table).view(len(q), -1, q.shape[2])[:, None, self.first : self.length]
        return F.scaled_dot_product_attention(q[:, None], rows, rows, attn_mask=self.mask, scale=scale)[:, 0]


def prepare_decodes(
    step: StepInputs, group: int, window: int | None, rope: RotaryTables | None, tokens_per_block: int
) -> HostDecodes:
    """Compute the data that all layers of group number `group` share in a step of decodes. `rope` is the result of `signed_tables`."""
    # Tokens without a slot (-1) are written into block 0, which no request reads.
    positions = step.positions.long()
    slots = step.slots[group].long().clamp(min=0)
    table = step.block_tables[group].long()
    first = 0
    length = int(step.context_lengths[0])
    mask = None
    if len(slots) == 1:
        if window is not None and length > window:
            first_block = (length - window) // tokens_per_block
            table = table[:, first_block:]
            first = length - window - first_block * tokens_per_block
            length = length - first_block * tokens_per_block
    else:
        length = table.shape[1] * tokens_per_block
        token = torch.arange(length)
        mask = token <= positions[:, None]
        if window is not None:
            mask &= token > positions[:, None] - window
        mask = mask[:, None, None]
    rows = None if rope is None else (rope[0][positions], rope[1][positions])
    return HostDecodes(rows, slots // tokens_per_block, slots % tokens_per_block, table.flatten(), first, length, mask)


def signed_tables(rope: RotaryTables) -> RotaryTables:
    """Return rotary tables for whole heads, `(positions, 1, head_dim)`, from tables of half this width.

    With them x is rotated as x · cosines + (x with its two halves swapped) · signed sines.
    """
    cos, sin = rope
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
