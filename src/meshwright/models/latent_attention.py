"""Multi-head latent attention (DeepSeek-V2, 2024, §2.1): keys and values are expanded from a latent for each head.

A narrow latent of the token gives all heads' keys and values, another one the queries. Only a part of each query and key is rotated, and
all heads share the rotated part of the key. Values are narrower than keys.

The absorbed form expands no keys and values: a query is multiplied by its head's key matrix and attends to the latents themselves, and
the sum of latents is multiplied by the head's value matrix. A cache then has one latent and one rotated key for each token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshwright.kernels.attention import AttentionMask
from meshwright.kernels.linear import Linear
from meshwright.kernels.rope import RotaryTables, rotate_neighbours
from meshwright.models.norm import Norm
from meshwright.spec.blocks.latent_attention import LatentAttentionSpec
from meshwright.spec.blocks.positions import YarnScaling

if TYPE_CHECKING:
    from meshwright.models.hooks import BlockHooks


class LatentAttention(nn.Module):
    """Causal self-attention with latents for queries (unless `spec.q_rank` is 0) and for keys and values."""

    def __init__(self, spec: LatentAttentionSpec, hidden: int, plain: bool, hooks: BlockHooks) -> None:
        super().__init__()
        self.hooks = hooks
        self.heads = spec.heads
        self.kv_heads = spec.heads
        self.head_dim = spec.head_dim
        self.plain = plain
        self.rotated = spec.rotary.width
        self.value_head_dim = spec.value_head_dim
        self.q_rank = spec.q_rank
        self.kv_rank = spec.kv_rank
        unrotated = spec.head_dim - self.rotated
        latent = spec.kv_rank + self.rotated
        if spec.q_rank:
            self.down = Linear(hidden, spec.q_rank + latent, bias=False)
            self.q_norm = Norm(spec.latent_norm, spec.q_rank, plain)
        else:
            self.kv_down = Linear(hidden, latent, bias=False)
        self.q = Linear(spec.q_rank or hidden, spec.heads * spec.head_dim, bias=False)
        self.kv_norm = Norm(spec.latent_norm, spec.kv_rank, plain)
        self.kv_up = Linear(spec.kv_rank, spec.heads * (unrotated + spec.value_head_dim), bias=False)
        self.out = Linear(spec.heads * spec.value_head_dim, hidden, bias=False)
        scaling = spec.rotary.scaling
        self.score_scale = scaling.score_scale if isinstance(scaling, YarnScaling) else 1.0

    def forward(self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
        """The attention output for x `(batch, seq, hidden)`."""
        q, latent, shared_key = self._project(x)
        return self.out(self.hooks.attend_latents(self, q, self.kv_norm(latent), shared_key, rope, mask))

    def split_queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of each head's query that are not rotated, and that are, of q `(…, heads · head_dim)`."""
        plain, rotary = q.unflatten(-1, (self.heads, -1)).split((self.head_dim - self.rotated, self.rotated), dim=-1)
        return plain, rotary

    def expand(
        self, q_plain: Tensor, q_rotated: Tensor, latent: Tensor, rotated_key: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of each head, `(…, heads, ·)`, from the split queries, the latent and the shared key."""
        sizes = (self.head_dim - self.rotated, self.value_head_dim)
        k_plain, v = self.kv_up(latent).unflatten(-1, (self.heads, -1)).split(sizes, dim=-1)
        q = torch.cat((q_plain, q_rotated), dim=-1)
        if self.score_scale != 1:
            q = q * self.score_scale
        return q, torch.cat((k_plain, rotated_key[..., None, :].expand(*k_plain.shape[:-1], -1)), dim=-1), v

    def absorb(self, q_plain: Tensor) -> Tensor:
        """Queries for latents `(tokens, heads, kv_rank)` of the unrotated queries `(tokens, heads, head_dim - rotated)`."""
        return torch.bmm(q_plain.transpose(0, 1), self._head_matrices()[0]).transpose(0, 1)

    def expand_values(self, attended: Tensor) -> Tensor:
        """Attention output `(tokens, heads · value_head_dim)` of sums of latents `(tokens, heads, kv_rank)`."""
        out = attended.new_empty(*attended.shape[:2], self.value_head_dim)
        torch.bmm(attended.transpose(0, 1), self._head_matrices()[1].transpose(1, 2), out=out.transpose(0, 1))
        return out.flatten(1)

    def _head_matrices(self) -> tuple[Tensor, Tensor]:
        """Each head's matrices of keys and of values, `(heads, ·, kv_rank)`: views of the weight of `kv_up`."""
        matrices = self.kv_up.weight.unflatten(0, (self.heads, -1))
        keys, values = matrices.split((self.head_dim - self.rotated, self.value_head_dim), dim=1)
        return keys, values

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `(batch, seq, heads · head_dim)`, the latent of keys and values, and the keys' shared part, not rotated yet."""
        if not self.q_rank:
            latent, shared_key = self.kv_down(x).split((self.kv_rank, self.rotated), dim=-1)
            return self.q(x), latent, self.hooks.gather_tokens(shared_key)
        q_latent, latent, shared_key = self.down(x).split((self.q_rank, self.kv_rank, self.rotated), dim=-1)
        return self.q(self.q_norm(q_latent)), latent, self.hooks.gather_tokens(shared_key)


def expand_and_attend(
    attention: LatentAttention,
    q: Tensor,
    latent: Tensor,
    shared_key: Tensor,
    rope: RotaryTables | None,
    mask: AttentionMask | None,
) -> Tensor:
    """The training form: attention output `(batch, seq, heads · value_head_dim)` with keys and values of each head.

    q is `(batch, seq, heads · head_dim)`, `latent` `(batch, seq, kv_rank)` after its norm, `shared_key` `(batch, seq, rotated)`; q and key
    are rotated here.
    """
    assert rope is not None, "latent attention has rotary positions"
    q_plain, q_rotary = attention.split_queries(q)
    rotated_key = rotate_neighbours(shared_key[:, :, None], rope)[:, :, 0]
    q, k, v = attention.expand(q_plain, rotate_neighbours(q_rotary, rope), latent, rotated_key)
    return attention.hooks.attend(q, k, v, mask, plain=attention.plain).flatten(-2)
