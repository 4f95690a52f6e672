"""A block of a decoder: attention and a feed-forward network, or experts, around the residual stream."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from meshwright.kernels.attention import AttentionMask
from meshwright.kernels.rope import RotaryTables, rotary_tables
from meshwright.kernels.row_quantize import RoundedMatrix
from meshwright.models.attention import Attention
from meshwright.models.hooks import BlockHooks
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.mlp import feed_forward_of
from meshwright.models.moe import CountedTokens, MixtureOfExperts, RoutedOutput
from meshwright.models.norm import Norm
from meshwright.spec.blocks.block import BlockSpec
from meshwright.spec.blocks.latent_attention import LatentAttentionSpec
from meshwright.spec.blocks.mixture import MixtureSpec
from meshwright.spec.blocks.positions import RotarySpec


class AttentionKind(NamedTuple):
    """What decides the mask and the rotary tables of a block: how it rotates, and how many tokens a token attends to."""

    rotary: RotarySpec | None
    window: int | None


class Block(nn.Module):
    """Norm and attention, then norm and feed-forward network, each with a residual; a parallel block has one norm for both.

    Where the description has norms of outputs, an output is normed before it is added; a parallel block has none.

    A `routed` block has a mixture of experts as its feed-forward network and returns a RoutedOutput. `parallel` and `serve` replace
    functions of `hooks`.
    """

    def __init__(self, spec: BlockSpec, plain: bool) -> None:
        super().__init__()
        self.hooks, self.attention_kind = BlockHooks(), attention_kind(spec)
        self.parallel, self.routed = len(spec.sublayers) == 1, spec.mixture is not None
        mixer, feed_forward = spec.mixer, spec.feed_forward
        self.attention_norm = Norm(spec.sublayers[0].norm, spec.hidden, plain)
        if isinstance(mixer, LatentAttentionSpec):
            self.attention: Attention | LatentAttention = LatentAttention(mixer, spec.hidden, plain, self.hooks)
        else:
            self.attention = Attention(mixer, spec.hidden, plain, self.hooks)
        self.attention_output_norm = _output_norm(spec, 0, plain)
        if not self.parallel:
            self.mlp_norm = Norm(spec.sublayers[1].norm, spec.hidden, plain)
        if isinstance(feed_forward, MixtureSpec):
            self.moe = MixtureOfExperts(feed_forward, spec.hidden, plain, self.hooks)
        else:
            self.mlp = feed_forward_of(feed_forward, spec.hidden, plain)
        self.mlp_output_norm = _output_norm(spec, -1, plain)

    def forward(
        self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None, counted: CountedTokens | None = None
    ) -> Tensor | RoutedOutput:
        """The block's output for x `(batch, seq, hidden)`.

        `rope`, `mask` and `counted` (the tokens that routers count) are those of `models.decoder.SharedInputs`.
        """
        return self.hooks.run(self, x, rope, mask, counted)

    def compute(
        self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None, counted: CountedTokens | None = None
    ) -> Tensor | RoutedOutput:
        """As `forward`, on one device and without recompute."""
        if self.parallel and not self.routed:
            return x + self.hooks.add_branches(self, self.attention_norm(x), rope, mask)
        x, normed = self.add_attention(x, rope, mask)
        if not self.routed:
            return x + self.normed_output(self.mlp(normed))
        routed = cast("RoutedOutput", self.moe(normed, counted))
        # Not `_replace`, whose result torch 2.11 cannot return from a compiled function.
        return RoutedOutput(x + self.normed_output(routed.x), routed.balance, routed.load, routed.squares)

    def add_attention(self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> tuple[Tensor, Tensor]:
        """x with the attention's output added, and the input of the feed-forward network."""
        normed = self.attention_norm(x)
        x = x + self.attended(normed, rope, mask)
        return x, normed if self.parallel else self.mlp_norm(x)

    def attended(self, normed: Tensor | RoundedMatrix, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
        """The attention's output as it is added to the residual stream."""
        y = self.hooks.sum_ranks(self.attention(normed, rope, mask))
        return y if self.attention_output_norm is None else self.attention_output_norm(y)

    def normed_output(self, y: Tensor) -> Tensor:
        """An output of the feed-forward network, or of the experts, as it is added to the residual stream."""
        y = self.hooks.sum_ranks(y)
        return y if self.mlp_output_norm is None else self.mlp_output_norm(y)


def _output_norm(spec: BlockSpec, sublayer: int, plain: bool) -> Norm | None:
    norm = spec.sublayers[sublayer].norm_out
    return None if norm is None else Norm(norm, spec.hidden, plain)


def attention_kind(block: BlockSpec) -> AttentionKind:
    """What decides the mask and the rotary tables of a block."""
    return AttentionKind(block.mixer.rotary, block.mixer.window)


def tables_of(rotary: RotarySpec | None, positions: Tensor, dtype: torch.dtype) -> RotaryTables | None:
    """The rotary tables of `positions` for activations of `dtype`; None without rotation."""
    return None if rotary is None else rotary_tables(positions, rotary.width, rotary.base, rotary.scaling, dtype)
