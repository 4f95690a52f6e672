"""The decoder-only transformer that a ModelSpec describes: GPT-2/3, Llama 2/3.x, Qwen3, Mixtral, DeepSeek, MegaScale's.

The code is single-device PyTorch; `parallel` adds sharding, recompute and compilation. The parameters are exactly those
of `spec.model.parameters`. Projections with the same input are fused into one matrix: queries, keys and values; gate
and up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.attention import AttentionMask, attention, make_mask
from meshwright.kernels.linear import Linear
from meshwright.kernels.loss import LossSums, linear_cross_entropy
from meshwright.kernels.rope import RotaryTables, rotary_tables, rotate
from meshwright.models.dimension_checks import check_dimensions
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.mlp import feed_forward
from meshwright.models.moe import CountedTokens, MixtureOfExperts, RoutedOutput
from meshwright.models.norm import Norm
from meshwright.models.prediction import FurtherTokens, PredictionModule, further_tokens
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec


class SharedInputs(NamedTuple):
    """Inputs that all blocks of one micro-batch share: token positions, rotary tables, attention mask.

    `counted` tells which tokens routers of experts count; None: all.
    """

    positions: Tensor
    rope: RotaryTables | None
    mask: AttentionMask | None
    counted: CountedTokens | None = None


class Losses(NamedTuple):
    """Sums of the training loss as differentiable scalars.

    `tokens`: losses of the next tokens; `balance`: balance losses over all sequences and layers with experts; `further`: losses of the
    tokens that prediction modules predict, over all modules.
    """

    tokens: Tensor
    balance: Tensor
    further: Tensor


class HeadLosses(NamedTuple):
    """The losses of the head with prediction modules: of next tokens, `further` as in Losses, and the modules' routers."""

    tokens: LossSums
    further: Tensor
    routed: tuple[RoutedOutput, ...]


class Decoder(nn.Module):
    """Token embedding, blocks, final norm, head, prediction modules.

    `plain` selects the reference implementation of all kernels, which uses PyTorch operators only; `loss_chunk` is the number of tokens
    whose logits are in memory at a time in training, `z_loss` the weight of the z-loss in gradients. Create it under
    `torch.device("meta")` and allocate its memory with `to_empty`; it has no buffers. Raises BadInput for dimensions that do not match.
    """

    def __init__(self, spec: ModelSpec, *, plain: bool = False, loss_chunk: int = 4096, z_loss: float = 0.0) -> None:
        super().__init__()
        check_dimensions(spec)
        self.spec, self.plain = spec, plain
        self.embed = Embedding(_weight(spec.vocab_size, spec.hidden))
        learned = spec.positions == "learned"
        self.positions = Embedding(_weight(spec.max_seq_len, spec.hidden)) if learned else None
        self.layers = nn.ModuleDict(
            {str(layer): Block(spec, plain, routed=spec.routed(layer)) for layer in range(spec.layers)}
        )
        self.norm = Norm(spec.norm, spec.hidden, spec.norm_eps, plain)
        self.head = Head(
            None if spec.tied else _weight(spec.vocab_size, spec.hidden), loss_chunk, plain=plain, z_loss=z_loss
        )
        self.predictions = nn.ModuleList(
            PredictionModule(spec, plain, Block(spec, plain, routed=spec.experts > 0))
            for _ in range(spec.prediction_depth)
        )

    def forward(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Logits `(batch, seq, vocab)` of tokens `(batch, seq)`, or with targets the sum of their losses.

        The sum is fp32 (fp64 in fp64). `targets` `(batch, seq)`: the token to predict at each position; negative targets are
        ignored. `positions` `(batch, seq)`: from 0 in each sequence if None. `documents` `(batch, seq)`: document numbers; a token
        attends only to its own document; None means one document per sequence.
        """
        return _value(self.logits_or_loss(self._run_blocks(tokens, positions, documents)[0], targets))

    def losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Losses:
        """The sums of the training loss; arguments and token losses are as in `forward`."""
        x, balance = self._run_blocks(tokens, positions, documents)
        if not self.predictions:
            return Losses(_value(self.logits_or_loss(x, targets)), balance, torch.zeros_like(balance))
        further = further_tokens(tokens, targets, documents, len(self.predictions))
        shared = self.shared_inputs(tokens, positions, documents, x.dtype)
        losses = self.head_losses(x, targets, further, shared)
        return Losses(losses.tokens.loss, sum((routed.balance for routed in losses.routed), balance), losses.further)

    def _run_blocks(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        shared = self.shared_inputs(tokens, positions, documents, self.embed.weight.dtype)
        x, balance = self.embed_tokens(tokens, shared), torch.zeros((), device=tokens.device)
        for layer in self.layers.values():
            x = layer(x, shared.rope, shared.mask)
            if isinstance(x, RoutedOutput):
                x, balance = x.x, balance + x.balance
        return x, balance

    def shared_inputs(
        self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None, dtype: torch.dtype
    ) -> SharedInputs:
        """The inputs that all blocks of one micro-batch share, for activations of `dtype`."""
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
        """The attention mask of sequences of `seq` tokens, for the queries at the positions `queries` (None: all)."""
        dense = self.plain or dtype == torch.float64
        return make_mask(documents, self.spec.sliding_window, seq, device, queries=queries, plain=dense)

    def embed_tokens(self, tokens: Tensor, shared: SharedInputs) -> Tensor:
        """The first block's input `(batch, seq, hidden)`."""
        x = self.embed(tokens)
        return x if self.positions is None else x + self.positions(shared.positions)

    def logits_or_loss(self, x: Tensor, targets: Tensor | None) -> Tensor | LossSums:
        """Logits of the last block's output, or with targets the sums of its losses."""
        return self.head(self.norm(x), targets, self._tied_weight())

    def head_losses(self, x: Tensor, targets: Tensor, further: FurtherTokens, shared: SharedInputs) -> HeadLosses:
        """The losses of the last block's output: of the next tokens, and of further tokens by the prediction modules."""
        hidden, tied = self.norm(x), self._tied_weight()
        sums = self.head(hidden, targets, tied)
        assert isinstance(sums, LossSums)
        further_loss, routed = torch.zeros_like(sums.loss), []
        for depth, module in enumerate(self.predictions):
            assert isinstance(module, PredictionModule)
            # `block.forward` as `parallel` wraps it; the embedding of a token has no position, its hidden state has.
            y = module.block.forward(
                module.join(hidden, self.embed(further.inputs[..., depth])), shared.rope, shared.mask, shared.counted
            )
            if isinstance(y, RoutedOutput):
                routed.append(y)
                y = y.x
            hidden = module.norm(y)
            further_loss = further_loss + _value(self.head(hidden, further.targets[..., depth], tied))
        return HeadLosses(sums, further_loss, tuple(routed))

    def _tied_weight(self) -> Tensor | None:
        return self.embed.weight if self.spec.tied else None

    def rope(self, positions: Tensor, dtype: torch.dtype) -> RotaryTables | None:
        """The rotary tables of `positions`; None for a model with learned positions."""
        if self.spec.positions != "rope":
            return None
        scaling = self.spec.yarn or self.spec.rope_scaling
        return rotary_tables(positions, self.spec.rotary_dim, self.spec.rope_theta, scaling, dtype)

    def _check_length(self, seq: int) -> None:
        if self.positions is not None and seq > self.spec.max_seq_len:
            raise BadInput(
                f"a sequence of {seq} tokens does not fit the model's learned positions: expected at most "
                f"model.max_seq_len = {self.spec.max_seq_len}; shorten train.seq_len or raise model.max_seq_len"
            )


class Embedding(nn.Module):
    """Table of vectors: one per token of the vocabulary, or per position."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, indices: Tensor) -> Tensor:
        """Vectors `(…, hidden)` of indices `(…)`."""
        return F.embedding(indices, self.weight)


class Block(nn.Module):
    """Norm and attention, then norm and feed-forward network, each with a residual; a parallel block has one norm for both.

    A `routed` block has a mixture of experts as its feed-forward network and returns a RoutedOutput. Tensor parallelism replaces
    `add_branches`, so that both branches of a parallel block share their collectives (`parallel.tensor`).
    """

    add_branches: Callable[[Block, Tensor, RotaryTables | None, AttentionMask | None], Tensor]

    def __init__(self, spec: ModelSpec, plain: bool, *, routed: bool = False) -> None:
        super().__init__()
        self.parallel, self.routed = spec.parallel_block, routed
        self.attention_norm = Norm(spec.norm, spec.hidden, spec.norm_eps, plain)
        self.attention = LatentAttention(spec, plain) if spec.kv_rank else Attention(spec, plain)
        if not spec.parallel_block:
            self.mlp_norm = Norm(spec.norm, spec.hidden, spec.norm_eps, plain)
        if routed:
            self.moe = MixtureOfExperts(spec, plain)
        else:
            self.mlp = feed_forward(spec, spec.ffn_hidden, plain)
        self.add_branches = sum_of_branches

    def forward(
        self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None, counted: CountedTokens | None = None
    ) -> Tensor | RoutedOutput:
        """The block's output for x `(batch, seq, hidden)`; the others are those of `SharedInputs`."""
        if self.parallel and not self.routed:
            return x + self.add_branches(self, self.attention_norm(x), rope, mask)
        x, normed = self.add_attention(x, rope, mask)
        if not self.routed:
            return x + self.mlp(normed)
        routed = cast("RoutedOutput", self.moe(normed, counted))
        # Not `_replace`, whose result torch 2.11 cannot return from a compiled function.
        return RoutedOutput(x + routed.x, routed.balance, routed.load, routed.squares)

    def add_attention(self, x: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> tuple[Tensor, Tensor]:
        """x with the attention's output added, and the input of the feed-forward network."""
        normed = self.attention_norm(x)
        x = x + self.attention(normed, rope, mask)
        return x, normed if self.parallel else self.mlp_norm(x)


def sum_of_branches(block: Block, normed: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
    """Sum of the attention and feed-forward outputs of a parallel block, without the residual."""
    return block.attention(normed, rope, mask) + block.mlp(normed)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads.

    Context parallelism replaces `attend` by attention over sequences that are divided over ranks (`parallel.context`).
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
        return self.out(self.attend_heads(self.qkv(x), rope, mask))

    def attend_heads(self, qkv: Tensor, rope: RotaryTables | None, mask: AttentionMask | None) -> Tensor:
        """Attention output `(batch, seq, heads · head_dim)` of the projected queries, keys and values `qkv`."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        return self.attend(q, k, v, mask, plain=self.plain).flatten(-2)


class Head(nn.Module):
    """Output projection and, with targets, the loss: one module, so that hooks on it cover both.

    `weight` is None for a tied head.
    """

    def __init__(
        self, weight: nn.Parameter | None, loss_chunk: int, *, plain: bool = False, z_loss: float = 0.0
    ) -> None:
        super().__init__()
        self.weight, self.loss_chunk, self.plain, self.z_loss = weight, loss_chunk, plain, z_loss

    def forward(self, hidden: Tensor, targets: Tensor | None = None, tied: Tensor | None = None) -> Tensor | LossSums:
        """Logits of hidden `(batch, seq, hidden)`, or with targets the sums of the losses.

        `tied` is the embedding's weight if the head has no weight.
        """
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head needs the embedding's weight"
        if targets is None:
            return F.linear(hidden, weight)
        rows, losses = hidden.flatten(0, 1), {"z_loss": self.z_loss, "plain": self.plain}
        return linear_cross_entropy(rows, weight, targets.flatten(), self.loss_chunk, **losses)


def _value(output: Tensor | LossSums) -> Tensor:
    """Logits, or the summed cross-entropy."""
    return output.loss if isinstance(output, LossSums) else output


def _weight(out_features: int, in_features: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(out_features, in_features))
