"""A block of a decoder: attention and a feed-forward network, or experts, around the residual stream."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from meshwright.kernels.attention import AttentionMask
from meshwright.kernels.rope import RotaryTables, query_factors, rotary_tables
from meshwright.kernels.row_quantize import RoundedMatrix
from meshwright.models.attention import Attention
from meshwright.models.hooks import BlockHooks
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.mlp import feed_forward_of
from meshwright.models.moe import CountedTokens, MoELayer, RoutedOutput
from meshwright.models.norm import Norm
from meshwright.spec.blocks.block import BlockSpec
from meshwright.spec.blocks.latent_attention import LatentAttentionSpec
from meshwright.spec.blocks.moe import MoESpec
from meshwright.spec.blocks.norm import NormSpec
from meshwright.spec.blocks.positions import RotarySpec


class AttentionKind(NamedTuple):
    """What decides the mask and the rotary tables of a block; blocks of the same kind share them.

    - `rotary`: how queries and keys are rotated; None without rotation.
    - `window`: to how many tokens a token attends; None: to all earlier ones.
    - `cap`: the cap of attention scores, or None.
    - `head_dim`: the size of heads; None if values have another size than keys.
    """

    rotary: RotarySpec | None
    window: int | None
    cap: float | None = None
    head_dim: int | None = None


class Block(nn.Module):
    """Norm and attention, then norm and feed-forward network, each with a residual connection.

    A parallel block has one norm, and adds both outputs to its input together. The description may have norms of outputs: then an output is
    normed before it is added, and so it may have a factor. A parallel block has neither. Without a norm of the input, attention or the
    feed-forward network reads the residual stream itself.

    A `routed` block has an MoE layer as its feed-forward network and returns a RoutedOutput. `parallel` and `serve` replace functions of
    `hooks`. With `reference` the block uses the kernels' reference implementations, which have PyTorch operators only.
    """

    def __init__(self, spec: BlockSpec, reference: bool) -> None:
        super().__init__()
        self.hooks = BlockHooks()
        self.attention_kind = attention_kind(spec)
        self.parallel = len(spec.sublayers) == 1
        self.routed = spec.moe is not None
        mixer = spec.mixer
        feed_forward = spec.feed_forward
        self.residual_factor = spec.sublayers[0].factor
        self.attention_norm = _norm(spec.sublayers[0].norm, spec.hidden, reference)
        if isinstance(mixer, LatentAttentionSpec):
            self.attention: Attention | LatentAttention = LatentAttention(mixer, spec.hidden, reference, self.hooks)
        else:
            self.attention = Attention(mixer, spec.hidden, reference, self.hooks)
        self.attention_output_norm = _norm(spec.sublayers[0].norm_out, spec.hidden, reference)
        if not self.parallel:
            self.mlp_norm = _norm(spec.sublayers[1].norm, spec.hidden, reference)
        if isinstance(feed_forward, MoESpec):
            self.moe = MoELayer(feed_forward, spec.hidden, reference, self.hooks)
        else:
            self.mlp = feed_forward_of(feed_forward, spec.hidden, reference)
        self.mlp_output_norm = _norm(spec.sublayers[-1].norm_out, spec.hidden, reference)

    def forward(
        self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None, counted: CountedTokens | None = None
    ) -> Tensor | RoutedOutput:
        """Return the block's output for x `(batch, seq, hidden)`.

        `rope`, `mask` and `counted` (the tokens that routers count) come from `models.decoder.SharedInputs`.
        """
        return self.hooks.run(self, x, rope, mask, counted)

    def compute(
        self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None, counted: CountedTokens | None = None
    ) -> Tensor | RoutedOutput:
        """As `forward`, without what `hooks.run` adds (recompute, compilation)."""
        if self.parallel and not self.routed:
            return x + self.hooks.sum_of_branches(self, _normed(x, self.attention_norm), rope, mask)
        x, normed = self.add_attention(x, rope, mask)
        if not self.routed:
            return x + self.mlp_branch_output(self.mlp(normed))
        routed = cast("RoutedOutput", self.moe(normed, counted))
        # Not `_replace`, whose result torch 2.11 cannot return from a compiled function.
        return RoutedOutput(x + self.mlp_branch_output(routed.x), routed.balance, routed.load, routed.squares)

    def add_attention(self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> tuple[Tensor, Tensor]:
        """Return x plus the attention's output, and the input of the feed-forward network."""
        normed = _normed(x, self.attention_norm)
        x = x + self.attention_branch_output(normed, rope, mask)
        return x, normed if self.parallel else _normed(x, self.mlp_norm)

    def attention_branch_output(
        self, normed: Tensor | RoundedMatrix, rope: RotaryTables | None, mask: AttentionMask | None
    ) -> Tensor:
        """Return the attention's output in the form in which it is added to the residual stream: normed and multiplied by its factor."""
        return self._added(self.attention(normed, rope, mask), self.attention_output_norm)

    def mlp_branch_output(self, y: Tensor) -> Tensor:
        """Return the output y of the feed-forward network or experts in the form in which it is added to the residual stream."""
        return self._added(y, self.mlp_output_norm)

    def _added(self, y: Tensor, norm: Norm | None) -> Tensor:
        y = _normed(self.hooks.sum_ranks(y), norm)
        return y if self.residual_factor == 1 else y * self.residual_factor


def _norm(norm: NormSpec | None, width: int, reference: bool) -> Norm | None:
    return None if norm is None else Norm(norm, width, reference)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)


def attention_kind(block: BlockSpec) -> AttentionKind:
    """Return the kind of a block's attention."""
    mixer = block.mixer
    head_dim = None if isinstance(mixer, LatentAttentionSpec) else mixer.head_dim
    return AttentionKind(mixer.rotary, mixer.window, mixer.score_cap, head_dim)


def tables_of(rotary: RotarySpec | None, positions: Tensor, dtype: torch.dtype, length: int) -> RotaryTables | None:
    """Return rotary tables for tokens at `positions` in sequences of `length` tokens, in `dtype`; None if the block does not rotate."""
    if rotary is None:
        return None
    tables = rotary_tables(positions, rotary.width, rotary.base, rotary.scaling, dtype, length=length)
    if not rotary.growth_length:
        return tables
    return *tables, query_factors(positions, rotary.query_growth, rotary.growth_length, dtype)
