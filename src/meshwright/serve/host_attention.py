"""Decodes on a CPU: one token of each request attends to the paged cache, for all requests in one matmul.

The plain reference loops over the requests and computes indices in every layer. Here all layers share the indices of a step, because for a
small model these small operations would take longer than the matmuls.
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
    """Indices, rotary tables and mask of a step of decodes, for the layers of one group."""

    rope: RotaryTables | None
    """Cosines and signed sines, each `(sequences, 1, head_dim)`."""
    blocks: Tensor
    offsets: Tensor
    """`(sequences,)` int64: block, and place in the block, of each new token."""
    table: Tensor
    """`(sequences · columns,)` int64: the blocks that are read."""
    first: int
    length: int
    """First and last + 1 of the tokens in these blocks that are read by a single request."""
    mask: Tensor | None
    """`(sequences, 1, 1, tokens)`: which tokens each request reads; None for a single request."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_layer: Tensor,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Attention output of q `(sequences, heads, head_dim)`, shaped like q.

        k and v `(sequences, kv_heads, head_dim)` are written into `cache_layer` first. `sinks` and `cap` as in `kernels.attention`.
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
        """Sums of cached rows `(sequences, heads, width)` of q, shaped alike; the tokens are in the cache already.

        `cache_layer` is `(blocks, tokens, width)`, and scores are multiplied by `scale`.
        """
        rows = cache_layer.index_select(0, self.table).view(len(q), -1, q.shape[2])[:, None, self.first : self.length]
        return F.scaled_dot_product_attention(q[:, None], rows, rows, attn_mask=self.mask, scale=scale)[:, 0]


def prepare_decodes(
    step: StepInputs, group: int, window: int | None, rope: RotaryTables | None, tokens_per_block: int
) -> HostDecodes:
    """Return the data that a group's layers share in a step of decodes; `rope` has the tables of `signed_tables`."""
    # Tokens without a slot go to block 0, which is never read.
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
    """Tables `(positions, 1, head_dim)` with which x is rotated as x · cosines + (x with its halves swapped) · signed sines."""
    cos, sin = rope
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
