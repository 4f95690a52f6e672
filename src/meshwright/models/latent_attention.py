"""Multi-head latent attention (DeepSeek-V2, 2024, §2.1): the keys and values of all heads are expanded from one narrow vector per token.

This vector is the latent of the token. The queries have a latent of their own. Only a part of each query and key is rotated, and all heads
share the rotated part of the key. Values are narrower than keys.

In the absorbed form keys and values are not expanded. Each query is multiplied by the key matrix of its head and attends to the latents
themselves; the weighted sum of latents is then multiplied by the value matrix of the head. A cache then has only one latent and one rotated
key for each token.
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
    """Causal self-attention with a latent for keys and values, and a latent for queries unless `spec.q_rank` is 0.

    With `reference` the layer uses the kernels' reference implementations, which have PyTorch operators only.
    """

    def __init__(self, spec: LatentAttentionSpec, hidden: int, reference: bool, hooks: BlockHooks) -> None:
        super().__init__()
        self.hooks = hooks
        self.heads = spec.heads
        self.kv_heads = spec.heads
        self.head_dim = spec.head_dim
        self.reference = reference
        self.rotated = spec.rotary.width
        self.value_head_dim = spec.value_head_dim
        self.q_rank = spec.q_rank
        self.kv_rank = spec.kv_rank
        unrotated = spec.head_dim - self.rotated
        latent = spec.kv_rank + self.rotated
        if spec.q_rank:
            self.down = Linear(hidden, spec.q_rank + latent, bias=False)
            self.q_norm = Norm(spec.latent_norm, spec.q_rank, reference)
        else:
            self.kv_down = Linear(hidden, latent, bias=False)
        self.q = Linear(spec.q_rank or hidden, spec.heads * spec.head_dim, bias=False)
        self.kv_norm = Norm(spec.latent_norm, spec.kv_rank, reference)
        self.kv_up = Linear(spec.kv_rank, spec.heads * (unrotated + spec.value_head_dim), bias=False)
        self.out = Linear(spec.heads * spec.value_head_dim, hidden, bias=False)
        scaling = spec.rotary.scaling
        self.score_scale = scaling.score_scale if isinstance(scaling, YarnScaling) else 1.0

    def forward(self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
        """Return the attention output for x `(batch, seq, hidden)`."""
        q, latent, shared_key = self._project(x)
        return self.out(self.hooks.attend_latents(self, q, self.kv_norm(latent), shared_key, rope, mask))

    def split_queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Split each head's query into the part that is not rotated and the part that is. q is `(…, heads · head_dim)`."""
        sizes = (self.head_dim - self.rotated, self.rotated)
        unrotated, rotated = q.unflatten(-1, (self.heads, -1)).split(sizes, dim=-1)
        return unrotated, rotated

    def expand(
        self, q_unrotated: Tensor, q_rotated: Tensor, latent: Tensor, rotated_key: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of each head, `(…, heads, ·)`, from the split queries, the latent and the rotated key."""
        sizes = (self.head_dim - self.rotated, self.value_head_dim)
        k_unrotated, v = self.kv_up(latent).unflatten(-1, (self.heads, -1)).split(sizes, dim=-1)
        q = torch.cat((q_unrotated, q_rotated), dim=-1)
        if self.score_scale != 1:
            q = q * self.score_scale
        k_rotated = rotated_key[..., None, :].expand(*k_unrotated.shape[:-1], -1)
        return q, torch.cat((k_unrotated, k_rotated), dim=-1), v

    def absorb(self, q_unrotated: Tensor) -> Tensor:
        """Return queries for latents `(tokens, heads, kv_rank)`, from the unrotated queries `(tokens, heads, head_dim - rotated)`."""
        return torch.bmm(q_unrotated.transpose(0, 1), self._head_matrices()[0]).transpose(0, 1)

    def expand_values(self, attended: Tensor) -> Tensor:
        """Return the attention output `(tokens, heads · value_head_dim)`, from weighted sums of latents `(tokens, heads, kv_rank)`."""
        out = attended.new_empty(*attended.shape[:2], self.value_head_dim)
        torch.bmm(attended.transpose(0, 1), self._head_matrices()[1].transpose(1, 2), out=out.transpose(0, 1))
        return out.flatten(1)

    def _head_matrices(self) -> tuple[Tensor, Tensor]:
        """Return the key matrix and the value matrix of each head, `(heads, ·, kv_rank)`, as views of the weight of `kv_up`."""
        matrices = self.kv_up.weight.unflatten(0, (self.heads, -1))
        keys, values = matrices.split((self.head_dim - self.rotated, self.value_head_dim), dim=1)
        return keys, values

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `(batch, seq, heads · head_dim)`, the latent of keys and values, and the keys' shared part before rotation.

        If tensor ranks divide the tokens, `gather_tokens` returns the shared part for all tokens. Latents need no gather here: the linear
        layers that read latents gather their inputs themselves.
        """
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
    """Compute attention in the form for training, with expanded keys and values. Returns `(batch, seq, heads · value_head_dim)`.

    q is `(batch, seq, heads · head_dim)`, `latent` `(batch, seq, kv_rank)` after its norm, `shared_key` `(batch, seq, rotated)`. Queries
    and the shared key are rotated here.
    """
    assert rope is not None, "latent attention has rotary positions"
    q_unrotated, q_rotary = attention.split_queries(q)
    rotated_key = rotate_neighbours(shared_key[:, :, None], rope)[:, :, 0]
    q, k, v = attention.expand(q_unrotated, rotate_neighbours(q_rotary, rope), latent, rotated_key)
    return attention.hooks.attend(q, k, v, mask, reference=attention.reference).flatten(-2)
