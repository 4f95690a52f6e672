"""Self-attention with grouped key/value heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshwright.kernels.attention import AttentionMask
from meshwright.kernels.linear import Linear
from meshwright.kernels.rope import ROTATIONS, RotaryTables
from meshwright.models.norm import Norm
from meshwright.spec.blocks.attention import AttentionSpec

if TYPE_CHECKING:
    from meshwright.models.hooks import BlockHooks


def norm_all_heads(attention: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Norm q `(batch, seq, heads, head_dim)` over all its heads together, and k (with `kv_heads`) in the same way."""
    return attention.q_norm(q.flatten(-2)).view_as(q), attention.k_norm(k.flatten(-2)).view_as(k)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads.

    With `reference` it uses the kernels' reference implementations, which have PyTorch operators only.
    """

    def __init__(self, spec: AttentionSpec, hidden: int, reference: bool, hooks: BlockHooks) -> None:
        super().__init__()
        self.hooks = hooks
        self.heads = spec.heads
        self.kv_heads = spec.kv_heads
        self.head_dim = spec.head_dim
        self.reference = reference
        width = spec.heads * spec.head_dim
        kv_width = spec.kv_heads * spec.head_dim
        self.qkv = Linear(hidden, width + 2 * kv_width, bias=spec.qkv_bias)
        if spec.qk_norm is not None:
            # With `whole_norm` all heads of a token are normed together, otherwise each head alone.
            self.q_norm = Norm(spec.qk_norm, width if spec.whole_norm else spec.head_dim, reference)
            self.k_norm = Norm(spec.qk_norm, kv_width if spec.whole_norm else spec.head_dim, reference)
        self.qk_norm = spec.qk_norm is not None
        self.whole_norm = spec.whole_norm
        self.rotated_norm = spec.rotated_norm
        self.rotate = ROTATIONS["halves" if spec.rotary is None else spec.rotary.pairs]
        self.query_factor = spec.query_factor
        self.out = Linear(width, hidden, bias=spec.out_bias)
        self.sinks = nn.Parameter(torch.zeros(spec.heads)) if spec.sinks else None

    def forward(self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
        return self.out(self.attend_heads(self.qkv(x), rope, mask))

    def attend_heads(self, qkv: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
        """Return the attention output `(batch, seq, heads · head_dim)` of `qkv`, the projected queries, keys and values side by side."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        if self.qk_norm and self.whole_norm:
            q, k = self.hooks.norm_all_heads(self, q, k)
        elif self.qk_norm and not self.rotated_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.query_factor != 1 and not (self.qk_norm and self.rotated_norm):
            q = q * self.query_factor
        if rope is not None:
            q = self.rotate(q, rope)
            k = self.rotate(k, rope)
        if self.qk_norm and self.rotated_norm:
            q = self.q_norm(q) * self.query_factor
            k = self.k_norm(k)
        if rope is not None and len(rope) > 2:  # the third table has factors of queries that grow with the position
            q = q * rope[2]
        # Not every replacement of `attend` accepts `sinks`.
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        return self.hooks.attend(q, k, v, mask, reference=self.reference, **sinks).flatten(-2)
