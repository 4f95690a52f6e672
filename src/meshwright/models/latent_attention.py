"""Multi-head latent attention in its training form (DeepSeek-V2, 2024, §2.1): keys and values are expanded for each head.

A narrow latent of the token gives all heads' keys and values, another one the queries. Only a part of each query and key is rotated, and
all heads share the rotated part of the key. Values are narrower than keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.kernels.attention import AttentionMask, attention
from meshwright.kernels.linear import Linear
from meshwright.kernels.rope import RotaryTables, rotate_neighbours
from meshwright.models.norm import Norm
from meshwright.spec.model import ModelSpec

LATENT_NORM_EPS = 1e-6
"""DeepSeek's norms of latents do not use the model's epsilon."""


class LatentAttention(nn.Module):
    """Causal self-attention with latents for queries (unless `spec.q_rank` is 0) and for keys and values.

    Context parallelism replaces `attend`, as in `Attention`. Tensor parallelism replaces `gather_tokens`, since its ranks compute the
    shared part of the keys for their own tokens only (`parallel.tensor`).
    """

    attend: Callable[..., Tensor]
    gather_tokens: Callable[[Tensor], Tensor]

    def __init__(self, spec: ModelSpec, plain: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.plain = spec.heads, spec.heads, spec.head_dim, plain
        self.rotated, self.value_head_dim = spec.rope_head_dim, spec.value_head_dim
        self.q_rank, self.kv_rank = spec.q_rank, spec.kv_rank
        unrotated, latent = spec.head_dim - spec.rope_head_dim, spec.kv_rank + spec.rope_head_dim
        if spec.q_rank:
            self.down = Linear(spec.hidden, spec.q_rank + latent, bias=False)
            self.q_norm = Norm("rmsnorm", spec.q_rank, LATENT_NORM_EPS, plain)
        else:
            self.kv_down = Linear(spec.hidden, latent, bias=False)
        self.q = Linear(spec.q_rank or spec.hidden, spec.heads * spec.head_dim, bias=False)
        self.kv_norm = Norm("rmsnorm", spec.kv_rank, LATENT_NORM_EPS, plain)
        self.kv_up = Linear(spec.kv_rank, spec.heads * (unrotated + spec.value_head_dim), bias=False)
        self.out = Linear(spec.value_width, spec.hidden, bias=False)
        self.score_scale = spec.yarn.score_scale if spec.yarn else 1.0
        self.attend, self.gather_tokens = attention, lambda tokens: tokens

    def forward(self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
        """The attention output for x `(batch, seq, hidden)`."""
        assert rope is not None, "latent attention has rotary positions"
        q, latent, shared_key = self._project(x)
        return self.out(self._attend_heads(q, self.kv_up(self.kv_norm(latent)), shared_key, rope, mask))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `(batch, seq, heads · head_dim)`, the latent of keys and values, and the keys' shared part, not rotated yet."""
        if not self.q_rank:
            latent, shared_key = self.kv_down(x).split((self.kv_rank, self.rotated), dim=-1)
            return self.q(x), latent, self.gather_tokens(shared_key)
        q_latent, latent, shared_key = self.down(x).split((self.q_rank, self.kv_rank, self.rotated), dim=-1)
        return self.q(self.q_norm(q_latent)), latent, self.gather_tokens(shared_key)

    def _attend_heads(
        self, q: Tensor, keys_values: Tensor, shared_key: Tensor, rope: RotaryTables, mask: AttentionMask | None
    ) -> Tensor:
        """Attention output `(batch, seq, heads · value_head_dim)`."""
        unrotated = self.head_dim - self.rotated
        q_plain, q_rotary = q.unflatten(-1, (self.heads, -1)).split((unrotated, self.rotated), dim=-1)
        k_plain, v = keys_values.unflatten(-1, (self.heads, -1)).split((unrotated, self.value_head_dim), dim=-1)
        k_rotary = rotate_neighbours(shared_key[:, :, None], rope).expand(-1, -1, self.heads, -1)
        q = torch.cat((q_plain, rotate_neighbours(q_rotary, rope)), dim=-1)
        if self.score_scale != 1:
            q = q * self.score_scale
        k = torch.cat((k_plain, k_rotary), dim=-1)
        return self.attend(q, k, v, mask, plain=self.plain).flatten(-2)
