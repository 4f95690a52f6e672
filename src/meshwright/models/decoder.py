"""The decoder-only transformer that a ModelSpec describes: GPT-2/3, Llama 2/3.x, Qwen3, Mixtral, DeepSeek, MegaScale's.

The code is single-device PyTorch; `parallel` adds sharding, recompute and compilation. The parameters are exactly those that
`spec.model.parameters` lists. Projections with the same input are fused into one matrix: queries, keys and values; gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels.attention import AttentionMask, make_mask
from meshwright.kernels.loss import LossSums, capped, linear_cross_entropy, token_log_probabilities
from meshwright.kernels.norm import accumulate_dtype
from meshwright.kernels.rope import RotaryTables
from meshwright.kernels.score import scores, weighted_sum
from meshwright.models.adapter import add_adapters
from meshwright.models.block import AttentionKind, Block, attention_kind, tables_of
from meshwright.models.moe import CountedTokens, RoutedOutput
from meshwright.models.norm import Norm
from meshwright.models.prediction import FurtherTokens, PredictionModule, further_tokens
from meshwright.spec.dimension_checks import check_dimensions
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec


class SharedInputs(NamedTuple):
    """Inputs that the blocks of one micro-batch share.

    `positions` are the tokens' positions. `by_kind` has the rotary tables and the mask for each kind of attention. `counted` are the tokens
    that routers count; None means all.
    """

    positions: Tensor
    by_kind: Mapping[AttentionKind, tuple[RotaryTables | None, AttentionMask | None]]
    counted: CountedTokens | None = None

    @property
    def rotary_tensors(self) -> list[Tensor]:
        """The tensors of all rotary tables."""
        return [table for rope, _ in self.by_kind.values() for table in rope or ()]

    def of(self, kind: AttentionKind) -> tuple[RotaryTables | None, AttentionMask | None]:
        """The rotary tables and the mask of blocks with this kind of attention."""
        return self.by_kind[kind]


class Losses(NamedTuple):
    """Sums of the training losses, as differentiable scalars.

    - `tokens`: losses of the next tokens.
    - `balance`: balance losses over all sequences and all layers with experts.
    - `further`: losses of the further tokens that the prediction modules predict, over all modules.
    """

    tokens: Tensor
    balance: Tensor
    further: Tensor


OfLogProbabilities = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function by which an objective replaces the cross-entropy. It maps the log-probabilities `(batch, seq)` of the targets to:

- the loss, a scalar sum over the micro-batch;
- a factor `(batch, seq)` for each token, by which the gradient of the token's cross-entropy is multiplied. It is the negative derivative of
  the loss with respect to the token's log-probability.
"""


class HeadLosses(NamedTuple):
    """The losses of the head of a model with prediction modules."""

    tokens: LossSums
    """Losses of the next tokens."""
    further: Tensor
    """Losses of the further tokens that the prediction modules predict, over all modules."""
    routed: tuple[RoutedOutput, ...]
    """The outputs of prediction modules whose blocks have experts, with the losses of their routers."""


class Decoder(nn.Module):
    """Token embedding, blocks, final norm, head, prediction modules.

    - `reference`: use the reference implementation of all kernels, which has PyTorch operators only.
    - `loss_chunk`: number of tokens whose logits are in memory at a time in training.
    - `z_loss`: weight of the z-loss in the gradients.

    Create it under `torch.device("meta")` and allocate its memory with `to_empty`; it has no buffers. Raises BadInput for dimensions that
    do not fit each other.
    """

    def __init__(
        self, spec: ModelSpec, *, reference: bool = False, loss_chunk: int = 4096, z_loss: float = 0.0
    ) -> None:
        super().__init__()
        check_dimensions(spec)
        self.spec = spec
        self.reference = reference
        self.embed = Embedding(_weight(spec.vocab_size, spec.hidden))
        learned = spec.positions == "learned"
        self.positions = Embedding(_weight(spec.max_seq_len, spec.hidden)) if learned else None
        self.layers = nn.ModuleDict({str(layer): Block(spec.block(layer), reference) for layer in range(spec.layers)})
        self.norm = Norm(spec.residual_norm, spec.hidden, reference)
        if spec.head == "score":
            self.head = ScoreHead(_weight(1, spec.hidden))
        else:
            self.head = Head(
                None if spec.tied else _weight(spec.vocab_size, spec.hidden),
                loss_chunk,
                cap=spec.logit_cap,
                factor=spec.logit_factor,
                reference=reference,
                z_loss=z_loss,
            )
        self.predictions = nn.ModuleList(
            PredictionModule(spec, reference, Block(spec.block(spec.layers), reference))
            for _ in range(spec.prediction_depth)
        )
        add_adapters(self, spec)

    def forward(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return logits `(batch, seq, vocab)` for tokens `(batch, seq)`, or with targets the sum of their losses.

        The sum is fp32 (fp64 in fp64). The other arguments are `(batch, seq)` too:

        - `targets`: the token to predict at each position; negative targets are ignored.
        - `weights`: factors of the losses; None: all are 1.
        - `positions`: positions of the tokens; None: counted from 0 in each sequence.
        - `documents`: document numbers; a token attends only to its own document. None: each sequence is one document.
        """
        return _value(self.logits_or_loss(self._run_blocks(tokens, positions, documents)[0], targets, weights))

    def losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        weights: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Losses:
        """Return the sums of the training losses; the arguments have the meaning that they have in `forward`."""
        x, balance = self._run_blocks(tokens, positions, documents)
        if not self.predictions:
            return Losses(_value(self.logits_or_loss(x, targets, weights)), balance, torch.zeros_like(balance))
        further = further_tokens(tokens, targets, documents, len(self.predictions), weights)
        shared = self.shared_inputs(tokens, positions, documents, x.dtype)
        losses = self.head_losses(x, targets, further, shared, weights)
        return Losses(losses.tokens.loss, sum((routed.balance for routed in losses.routed), balance), losses.further)

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the normed output of the last block `(batch, seq, hidden)`, the head's input; arguments as in `forward`."""
        return self.norm(self._run_blocks(tokens, positions, documents)[0])

    def _run_blocks(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        shared = self.shared_inputs(tokens, positions, documents, self.embed.weight.dtype)
        x = self.embed_tokens(tokens, shared.positions)
        balance = torch.zeros((), device=tokens.device)
        for layer in self.layers.values():
            assert isinstance(layer, Block)
            x = layer(x, *shared.of(layer.attention_kind))
            if isinstance(x, RoutedOutput):
                x, balance = x.x, balance + x.balance
        return x, balance

    def shared_inputs(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        documents: Tensor | None,
        dtype: torch.dtype,
        document_sizes: tuple[int, int] | None = None,
    ) -> SharedInputs:
        """Return the inputs that all blocks of one micro-batch share, for activations of `dtype`.

        `document_sizes` is passed to `kernels.attention.make_mask`.
        """
        seq = tokens.shape[1]
        self._check_length(seq)
        if positions is None:
            positions = torch.arange(seq, device=tokens.device)
        by_kind = self.attention_inputs(positions, documents, seq, dtype, document_sizes=document_sizes)
        return SharedInputs(positions, by_kind)

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The different kinds of attention that occur in the model's blocks."""
        return tuple(dict.fromkeys(attention_kind(block) for block in self.spec.block_kinds))

    def attention_inputs(
        self,
        positions: Tensor,
        documents: Tensor | None,
        seq: int,
        dtype: torch.dtype,
        *,
        queries: Tensor | None = None,
        document_sizes: tuple[int, int] | None = None,
    ) -> dict[AttentionKind, tuple[RotaryTables | None, AttentionMask | None]]:
        """Return `SharedInputs.by_kind` for sequences of `seq` tokens.

        `positions` are the positions of the tokens on this rank. `queries` are the indices in the sequence of the tokens that the masks
        have rows for; None means all.
        """
        kinds = self.attention_kinds
        dense = self.reference or dtype == torch.float64
        masks = {
            (window, cap): make_mask(
                documents,
                window,
                seq,
                positions.device,
                queries=queries,
                cap=cap,
                head_dim=head_dim,
                dtype=dtype,
                document_sizes=document_sizes,
                reference=dense,
            )
            for window, cap, head_dim in {(kind.window, kind.cap, kind.head_dim) for kind in kinds}
        }
        ropes = {rotary: tables_of(rotary, positions, dtype, seq) for rotary in {kind.rotary for kind in kinds}}
        return {kind: (ropes[kind.rotary], masks[kind.window, kind.cap]) for kind in kinds}

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the first block's input `(batch, seq, hidden)`: token embeddings, plus position embeddings if they are learned."""
        x = self.scaled_embedding(tokens)
        return x if self.positions is None else x + self.positions(positions)

    def scaled_embedding(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, multiplied by `embedding_scale` rounded to their dtype."""
        x = self.embed(tokens)
        return x if self.spec.embedding_scale == 1 else x * rounded_factor(self.spec.embedding_scale, x.dtype)

    def logits_or_loss(
        self,
        x: Tensor,
        targets: Tensor | None,
        weights: Tensor | None = None,
        objective: OfLogProbabilities | None = None,
    ) -> Tensor | LossSums:
        """Return the logits of the last block's output x, or with targets its summed losses; `objective` replaces the cross-entropy."""
        hidden = self.norm(x)
        tied = self._tied_weight()
        if targets is None:
            return self.head(hidden, None, tied)
        return self._sums(hidden, targets, tied, weights, objective)

    def head_losses(
        self,
        x: Tensor,
        targets: Tensor,
        further: FurtherTokens,
        shared: SharedInputs,
        weights: Tensor | None = None,
        objective: OfLogProbabilities | None = None,
    ) -> HeadLosses:
        """Return the losses of the last block's output x: of the next tokens, and of further tokens by the prediction modules."""
        hidden = self.norm(x)
        tied = self._tied_weight()
        sums = self._sums(hidden, targets, tied, weights, objective)
        further_loss = torch.zeros_like(sums.loss)
        routed = []
        for depth, module in enumerate(self.predictions):
            assert isinstance(module, PredictionModule)
            # `block.forward` and not `block(...)`, so that no module hooks run (as in `parallel.stages`). Only the token's embedding is
            # used, not its learned position: the hidden state already contains a position.
            y = module.block.forward(
                module.join(hidden, self.scaled_embedding(further.inputs[..., depth])),
                *shared.of(module.block.attention_kind),
                shared.counted,
            )
            if isinstance(y, RoutedOutput):
                routed.append(y)
                y = y.x
            hidden = module.norm(y)
            of_further = None if further.weights is None else further.weights[..., depth]
            further_loss = further_loss + _value(self.head(hidden, further.targets[..., depth], tied, of_further))
        return HeadLosses(sums, further_loss, tuple(routed))

    def _sums(
        self,
        hidden: Tensor,
        targets: Tensor,
        tied: Tensor | None,
        weights: Tensor | None,
        objective: OfLogProbabilities | None,
    ) -> LossSums:
        """Return the summed losses of the normed output.

        With an objective the head runs twice: first for the log-probabilities, from which the objective computes loss and factors, then
        for the gradients.
        """
        if objective is None:
            sums = self.head(hidden, targets, tied, weights)
            assert isinstance(sums, LossSums)
            return sums
        loss, weights = objective(self.head.log_probabilities(hidden, targets, tied))
        if not torch.is_grad_enabled():
            return LossSums(loss, torch.zeros_like(loss))
        sums = self.head(hidden, targets, tied, weights)
        assert isinstance(sums, LossSums)
        # The difference in brackets is 0: the loss has the objective's value and the head's gradient.
        return LossSums(loss + (sums.loss - sums.loss.detach()), sums.squares)

    def _tied_weight(self) -> Tensor | None:
        return self.embed.weight if self.spec.tied else None

    def _check_length(self, seq: int) -> None:
        if self.positions is not None and seq > self.spec.max_seq_len:
            raise BadInput(
                f"a sequence of {seq} tokens does not fit the model's learned positions: expected at most "
                f"model.max_seq_len = {self.spec.max_seq_len}; shorten train.seq_len or raise model.max_seq_len"
            )


class Embedding(nn.Module):
    """A table with a vector for each token of the vocabulary, or for each position."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, indices: Tensor) -> Tensor:
        """Return the vectors `(…, hidden)` of indices `(…)`."""
        return F.embedding(indices, self.weight)


class Head(nn.Module):
    """Output projection and, with targets, the loss. It is one module, so that module hooks cover both.

    `weight` is None for a tied head. `factor` multiplies the head's input, and so the logits. `cap` limits the logits
    (`ModelSpec.logit_cap`).
    """

    fixed_order = False
    """Whether `log_probabilities` gives exactly the bits that an invariant engine gives on a GPU (`kernels.fixed_matmul`)."""

    def __init__(
        self,
        weight: nn.Parameter | None,
        loss_chunk: int,
        *,
        factor: float = 1.0,
        cap: float | None = None,
        reference: bool = False,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.loss_chunk = loss_chunk
        self.reference = reference
        self.z_loss = z_loss
        self.factor = factor
        self.cap = cap

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        tied: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | LossSums:
        """Return logits for hidden `(batch, seq, hidden)`, or with targets the summed losses.

        `weights` `(batch, seq)` multiply the losses of the tokens. `tied` is the embedding's weight if the head has no weight.
        """
        weight = self.matrix(tied)
        hidden = self.scaled(hidden)
        if targets is None:
            return capped(F.linear(hidden, weight), self.cap)
        rows = hidden.flatten(0, 1)
        losses = {"cap": self.cap, "z_loss": self.z_loss, "reference": self.reference}
        of_tokens = None if weights is None else weights.flatten()
        return linear_cross_entropy(rows, weight, targets.flatten(), self.loss_chunk, weights=of_tokens, **losses)

    def log_probabilities(self, hidden: Tensor, targets: Tensor, tied: Tensor | None = None) -> Tensor:
        """Return the log-probability of each target `(batch, seq)`, without gradient; 0 where the target is negative.

        The dtype is fp32 (fp64 in fp64).
        """
        rows = self.scaled(hidden).flatten(0, 1)
        losses = {"cap": self.cap, "fixed_order": self.fixed_order, "reference": self.reference}
        found = token_log_probabilities(rows, self.matrix(tied), targets.flatten(), self.loss_chunk, **losses)
        return found.view_as(targets)

    def matrix(self, tied: Tensor | None) -> Tensor:
        """Return the head's weight, or the embedding's weight if the head is tied."""
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head needs the embedding's weight"
        return weight

    def scaled(self, hidden: Tensor) -> Tensor:
        """Return hidden multiplied by `factor`."""
        return hidden if self.factor == 1 else hidden * self.factor


class ScoreHead(Head):
    """The head of a reward model: it returns one number for each token, the score of the text up to this token, instead of logits.

    Where objectives expect the log-probability of a token, they get its score. Scores are computed and summed in fp32 (fp64 in fp64).
    """

    def __init__(self, score: nn.Parameter) -> None:
        super().__init__(None, loss_chunk=0)
        self.score = score

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        tied: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | LossSums:
        """Return the scores `(batch, seq, 1)` of hidden `(batch, seq, hidden)`; with targets, minus the sum of score · `weights`."""
        if targets is None:
            return self.values(hidden)[..., None]
        assert weights is not None, "an objective has a factor for each score"
        loss = weighted_sum(hidden.flatten(0, 1), self.score, -weights.flatten())
        return LossSums(loss, torch.zeros_like(loss))

    def log_probabilities(self, hidden: Tensor, targets: Tensor, tied: Tensor | None = None) -> Tensor:
        """Return the scores `(batch, seq)`, without gradient; the values of the targets do not matter."""
        return self.values(hidden)

    def values(self, hidden: Tensor) -> Tensor:
        """Return the scores `(batch, seq)` of hidden `(batch, seq, hidden)`, without gradient."""
        return scores(hidden, self.score)


@lru_cache(maxsize=64)
def rounded_factor(factor: float, dtype: torch.dtype) -> float:
    """Return the factor rounded to fp32 (fp64 for fp64) and then to `dtype`, as transformers rounds it."""
    return float(torch.tensor(factor, dtype=accumulate_dtype(dtype), device="cpu").to(dtype))


def _value(output: Tensor | LossSums) -> Tensor:
    """Return logits unchanged, and of summed losses the cross-entropy."""
    return output.loss if isinstance(output, LossSums) else output


def _weight(out_features: int, in_features: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(out_features, in_features))
