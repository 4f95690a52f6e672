"""The decoder-only transformer a ModelSpec describes: GPT-2/3, Llama 2/3.x, Qwen3, Mixtral, and MegaScale's variants.

It reads as one device's PyTorch; sharding, recompute and compilation are put around it by `parallel`. Its parameters
are exactly the rows of `spec.model.parameters`. Projections that share an input are one matrix: queries, keys and
values; gate and up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.attention import AttentionMask, attention, make_mask
from meshwright.kernels.linear import Linear
from meshwright.kernels.loss import linear_cross_entropy
from meshwright.kernels.norm import layer_norm, rms_norm
from meshwright.kernels.rope import RotaryTables, rotary_tables, rotate
from meshwright.models.dimension_checks import check_dimensions
from meshwright.models.mlp import feed_forward
from meshwright.models.moe import MixtureOfExperts, Routed
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec


class SharedInputs(NamedTuple):
    """What all blocks of one micro-batch share: token positions, rotary tables, attention mask."""

    positions: Tensor
    rope: RotaryTables | None
    mask: AttentionMask | None


class Decoder(nn.Module):
    """Token embedding, blocks, final norm, head.

    `plain` uses the kernels' plain twins everywhere; `loss_chunk` is how many tokens' logits exist at one time in
    training. Build it under `torch.device("meta")` and give it memory with `to_empty`: it has no buffers. Raises
    BadInput for dimensions that do not fit.
    """

    def __init__(self, spec: ModelSpec, *, plain: bool = False, loss_chunk: int = 4096) -> None:
        super().__init__()
        check_dimensions(spec)
        self.spec, self.plain = spec, plain
        self.embed = Table(_weight(spec.vocab_size, spec.hidden))
        learned = spec.positions == "learned"
        self.positions = Table(_weight(spec.max_seq_len, spec.hidden)) if learned else None
        self.layers = nn.ModuleDict(
            {str(layer): Block(spec, plain, routed=spec.routed(layer)) for layer in range(spec.layers)}
        )
        self.norm = Norm(spec.norm, spec.hidden, spec.norm_eps, plain)
        self.head = Head(None if spec.tied else _weight(spec.vocab_size, spec.hidden), loss_chunk, plain=plain)

    def forward(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Logits `(batch, seq, vocab)` of tokens `(batch, seq)`, or with targets the fp32 sum of their losses (fp64 in
        fp64).

        targets `(batch, seq)`: the token each place should say, negative to leave it out. positions `(batch, seq)`:
        counted from 0 in each row when None. documents `(batch, seq)`: numbers of the documents that attention stays
        inside; None is one per row.
        """
        return self.finished(self._through_blocks(tokens, positions, documents)[0], targets)

    def losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The two sums of the training loss: token losses and balance losses.

        Token losses are as in `forward`; balance losses are those of all sequences and layers with experts (`models.moe`; 0 for
        a dense model).
        """
        x, balance = self._through_blocks(tokens, positions, documents)
        return self.finished(x, targets), balance

    def _through_blocks(
        self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        shared = self.shared(tokens, positions, documents, self.embed.weight.dtype)
        x, balance = self.embedded(tokens, shared), torch.zeros((), device=tokens.device)
        for layer in self.layers.values():
            x = layer(x, shared.rope, shared.mask)
            if isinstance(x, Routed):
                x, balance = x.x, balance + x.balance
        return x, balance

    def shared(
        self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None, dtype: torch.dtype
    ) -> SharedInputs:
        """What every block of one micro-batch is handed beside its input, for activations of `dtype`."""
        self._check_length(tokens.shape[1])
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask = self.mask(documents, tokens.shape[1], tokens.device, dtype)
        return SharedInputs(positions, self.rope(positions, dtype), mask)

    def mask(
        self,
        documents: Tensor | None,
        seq: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        queries: Tensor | None = None,
    ) -> AttentionMask | None:
        """The attention mask of sequences of `seq` tokens, for the queries at the given places (None: all)."""
        dense = self.plain or dtype == torch.float64
        return make_mask(documents, self.spec.sliding_window, seq, device, queries=queries, plain=dense)

    def embedded(self, tokens: Tensor, shared: SharedInputs) -> Tensor:
        """The first block's input `(batch, seq, hidden)`."""
        x = self.embed(tokens)
        return x if self.positions is None else x + self.positions(shared.positions)

    def finished(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """Logits or summed loss of the last block's output."""
        tied = self.embed.weight if self.spec.tied else None
        return self.head(self.norm(x), targets, tied)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> RotaryTables | None:
        """The rotary tables of `positions`; None for a model without."""
        if self.spec.positions != "rope":
            return None
        return rotary_tables(positions, self.spec.head_dim, self.spec.rope_theta, self.spec.rope_scaling, dtype)

    def _check_length(self, seq: int) -> None:
        if self.positions is not None and seq > self.spec.max_seq_len:
            raise BadInput(
                f"a sequence of {seq} tokens does not fit the model's learned positions: expected at most "
                f"model.max_seq_len = {self.spec.max_seq_len}; shorten train.seq_len or raise model.max_seq_len"
            )


class Table(nn.Module):
    """A vector for each token, or for each place."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, indices: Tensor) -> Tensor:
        """`(…, hidden)` of row indices `(…)`."""
        return F.embedding(indices, self.weight)


class Block(nn.Module):
    """Norm and attention, norm and feed-forward network, each added to the stream; or both beside one norm.

    A `routed` block has a mixture of experts for its feed-forward network, and returns what the router did beside its output. `beside` is
    where tensor ranks let both branches of a parallel block share their exchanges (`parallel.tensor`).
    """

    beside: Callable[[Block, Tensor, RotaryTables | None, AttentionMask | None], Tensor]

    def __init__(self, spec: ModelSpec, plain: bool, *, routed: bool = False) -> None:
        super().__init__()
        self.parallel, self.routed = spec.parallel_block, routed
        self.attention_norm = Norm(spec.norm, spec.hidden, spec.norm_eps, plain)
        self.attention = Attention(spec, plain)
        if not spec.parallel_block:
            self.mlp_norm = Norm(spec.norm, spec.hidden, spec.norm_eps, plain)
        if routed:
            self.moe = MixtureOfExperts(spec, plain)
        else:
            self.mlp = feed_forward(spec, spec.ffn_hidden, plain)
        self.beside = side_by_side

    def forward(self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor | Routed:
        """x `(batch, seq, hidden)` and what all blocks share: the rotary tables and the attention mask."""
        normed = self.attention_norm(x)
        if self.parallel and not self.routed:
            return x + self.beside(self, normed, rope, mask)
        x = x + self.attention(normed, rope, mask)
        if not self.parallel:
            normed = self.mlp_norm(x)
        if not self.routed:
            return x + self.mlp(normed)
        routed = self.moe(normed)
        return Routed(x + routed.x, routed.balance, routed.load)


def side_by_side(block: Block, normed: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
    """What attention and the feed-forward network of a parallel block add to the stream."""
    return block.attention(normed, rope, mask) + block.mlp(normed)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads.

    `attend` is where sequences that are spread over ranks are put together (`parallel.context`).
    """

    attend: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, plain: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.plain = spec.heads, spec.kv_heads, spec.head_dim, plain
        width = spec.heads * spec.head_dim
        self.qkv = Linear(spec.hidden, width + 2 * spec.kv_heads * spec.head_dim, bias=spec.bias)
        if spec.qk_norm:
            self.q_norm = Norm("rmsnorm", spec.head_dim, spec.norm_eps, plain)
            self.k_norm = Norm("rmsnorm", spec.head_dim, spec.norm_eps, plain)
        self.qk_norm = spec.qk_norm
        self.out = Linear(width, spec.hidden, bias=spec.bias)
        self.attend = attention

    def forward(self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
        return self.out(self.attended(self.qkv(x), rope, mask))

    def attended(self, qkv: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
        """`(batch, seq, heads · head_dim)` of queries, keys and values as they were projected."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        return self.attend(q, k, v, mask, plain=self.plain).flatten(-2)


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with a bias."""

    def __init__(self, norm: str, width: int, eps: float, plain: bool) -> None:
        super().__init__()
        self.eps, self.plain = eps, plain
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, plain=self.plain)
        return layer_norm(x, self.weight, self.bias, self.eps, plain=self.plain)


class Head(nn.Module):
    """The product with the vocabulary and, given targets, the loss: one module, so that hooks on it see both.

    `weight` is None for a tied head.
    """

    def __init__(self, weight: nn.Parameter | None, loss_chunk: int, *, plain: bool = False) -> None:
        super().__init__()
        self.weight, self.loss_chunk, self.plain = weight, loss_chunk, plain

    def forward(self, hidden: Tensor, targets: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        """Logits of hidden `(batch, seq, hidden)`, or the summed loss; `tied` is the embedding's weight when the head
        owns none.
        """
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head is handed the embedding's weight"
        if targets is None:
            return F.linear(hidden, weight)
        return linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), self.loss_chunk, plain=self.plain)


def _weight(out_features: int, in_features: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(out_features, in_features))
