"""Embedding, head and loss with the vocabulary divided over tensor ranks (Shoeybi et al. 2019, §3); the head of a reward model.

A rank computes the logits of every token for its own rows of the vocabulary, a chunk of tokens at a time. Training does not exchange
logits: the cross-entropy needs only two numbers per token from each rank, the log-sum-exp of its logits and the target's logit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.kernels.compile_once import compile_once
from meshwright.kernels.loss import LossSums, cap_in_place, capped
from meshwright.kernels.norm import accumulate_dtype
from meshwright.kernels.sums import add_matmul, matmul, scale
from meshwright.models.decoder import Embedding, Head, ScoreHead
from meshwright.parallel.linear_exchanges import (
    ALL_GATHER,
    all_gather_tokens,
    group_by_name,
    reduce_scatter_tokens,
    scatter_tokens,
)


class VocabularyEmbedding(Embedding):
    """This rank's rows of the token embedding. Its first row is row `first` of the vocabulary."""

    def __init__(self, weight: nn.Parameter, first: int, group: str, ranks: int) -> None:
        super().__init__(weight)
        self.first = first
        self.group = group
        self.ranks = ranks

    def forward(self, indices: Tensor) -> Tensor:
        """Return the embeddings `(batch, seq / ranks, hidden)` of this rank's part of the sequence, for all tokens `(batch, seq)`."""
        rows = indices - self.first
        local_rows = self.weight.shape[0]
        not_local = (rows < 0) | (rows >= local_rows)
        # A token in another rank's rows must be given some local row, whose result and gradient are then zeroed. `remainder` spreads these
        # tokens over all rows, because atomic adds of many gradients to one row would be serialised.
        embedded = F.embedding(rows.remainder(local_rows), self.weight)
        # One rank has the token and the others add zeros, so the sum is exact.
        return scatter_tokens(embedded.masked_fill(not_local[..., None], 0.0), self.group, self.ranks)


class PositionEmbedding(Embedding):
    """Learned position embedding. Every rank has the whole weight and embeds its part of the sequence."""

    def __init__(self, weight: nn.Parameter, rank: int, ranks: int) -> None:
        super().__init__(weight)
        self.rank = rank
        self.ranks = ranks

    def forward(self, indices: Tensor) -> Tensor:
        """Return `(…, seq / ranks, hidden)`, the embeddings of this rank's part of positions `(…, seq)`."""
        return F.embedding(indices.chunk(self.ranks, dim=-1)[self.rank], self.weight)


class VocabularyHead(Head):
    """Head with this rank's rows of the vocabulary. With targets it also computes the loss of this rank's part of the sequence.

    `whole` is the head that this one replaces. `sizes` has the number of rows of each rank.
    """

    def __init__(self, whole: Head, sizes: tuple[int, ...], rank: int, group: str) -> None:
        super().__init__(whole.weight, whole.loss_chunk, factor=whole.factor, cap=whole.cap, z_loss=whole.z_loss)
        self.sizes = sizes
        self.rank = rank
        self.group = group

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        tied: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | LossSums:
        """Return logits `(batch, seq, vocab)` for hidden `(batch, seq / ranks, hidden)`, or with targets the summed losses.

        The losses are those of this rank's tokens. `targets` and `weights` `(batch, seq)` are for all ranks' tokens and equal on all ranks.
        """
        weight = self.matrix(tied)
        hidden = self.scaled(hidden)
        if targets is None:
            return self._logits(hidden, weight)
        sums = _LinearCrossEntropy.apply(
            hidden.flatten(0, 1),
            weight,
            self._ranked(targets),
            None if weights is None else self._ranked(weights.to(accumulate_dtype(hidden.dtype))),
            self.loss_chunk,
            self.sizes,
            self.rank,
            self.group,
            self.cap,
            self.z_loss,
            torch.is_grad_enabled(),
        )
        return LossSums(*sums)

    @torch.no_grad()
    def log_probabilities(self, hidden: Tensor, targets: Tensor, tied: Tensor | None = None) -> Tensor:
        """As `Head.log_probabilities`, for all ranks' tokens: hidden is `(batch, seq / ranks, hidden)`, targets `(batch, seq)`."""
        weight = self.matrix(tied)
        rows = self.scaled(hidden).flatten(0, 1)
        ranked = self._ranked(targets)
        ranks = len(self.sizes)
        parts = []
        part = max(1, self.loss_chunk // ranks)
        first = sum(self.sizes[: self.rank])
        for h, target in zip(rows.split(part), ranked.split(part, dim=1), strict=True):
            logits = all_gather_tokens(h[None], self.group, ranks)[0] @ weight.t()
            cap_in_place(logits, self.cap)
            own_total, own_target_logit = _run(_log_sum_and_target, logits, target.flatten() - first)
            total, target_logit = _combine_over_ranks(own_total, own_target_logit, self.group, ranks)
            parts.append(torch.where(target >= 0, (target_logit - total).view_as(target), 0.0))
        return torch.cat(parts, dim=1).unflatten(1, (len(targets), -1)).transpose(0, 1).flatten(1)

    def _ranked(self, whole: Tensor) -> Tensor:
        """Reorder a tensor `(batch, seq)` to `(ranks, batch · seq / ranks)`, the order in which a chunk's gathered tokens are."""
        return whole.unflatten(1, (len(self.sizes), -1)).transpose(0, 1).flatten(1)

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        ranks = len(self.sizes)
        longest = max(self.sizes)
        logits = capped(F.linear(all_gather_tokens(hidden, self.group, ranks), weight), self.cap)
        logits = F.pad(logits, (0, longest - weight.shape[0]))
        parts = [torch.empty_like(logits) for _ in range(ranks)]
        dist.all_gather(parts, logits, group=group_by_name(self.group))
        return torch.cat([part[..., :size] for part, size in zip(parts, self.sizes, strict=True)], dim=-1)


class DividedScoreHead(ScoreHead):
    """The head of a reward model, whole on every tensor rank. With targets it computes the loss of this rank's part of the sequence."""

    def __init__(self, whole: ScoreHead, rank: int, ranks: int, group: str) -> None:
        super().__init__(whole.score)
        self.rank = rank
        self.ranks = ranks
        self.group = group

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        tied: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | LossSums:
        """As `ScoreHead.forward`: hidden is `(batch, seq / ranks, hidden)`, scores and `weights` `(batch, seq)` are of all ranks."""
        if targets is None:
            return self.values(hidden)[..., None]
        assert weights is not None, "an objective has a factor for each score"
        return super().forward(hidden, targets, None, weights.chunk(self.ranks, dim=1)[self.rank])

    def values(self, hidden: Tensor) -> Tensor:
        """As `ScoreHead.values`, for all ranks' tokens: the result is `(batch, seq)`."""
        own = super().values(hidden)
        return all_gather_tokens(own[..., None], self.group, self.ranks)[..., 0]


class _LinearCrossEntropy(torch.autograd.Function):
    """`kernels.loss` with a divided vocabulary. Forward computes both gradients too, while the logits of a chunk exist.

    A chunk consists of the same slice of every rank's tokens. Without `trains`, forward computes the loss only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        chunk: int,
        sizes: tuple[int, ...],
        rank: int,
        group: str,
        cap: float | None,
        z_loss: float,
        trains: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = accumulate_dtype(hidden.dtype)
        ranks = len(sizes)
        first = sum(sizes[:rank])
        loss, squares = (torch.zeros((), dtype=wide, device=hidden.device) for _ in range(2))
        hidden_grad = torch.empty_like(hidden) if trains else None
        weight_grad: Tensor | None = None
        part = max(1, chunk // ranks)
        for start in range(0, hidden.shape[0], part):
            local_tokens = slice(start, start + part)
            tokens = all_gather_tokens(hidden[None, local_tokens], group, ranks)[0]
            target = targets[:, local_tokens]
            logits = tokens @ weight.t()
            derivative = cap_in_place(logits, cap)
            own_total, own_target_logit = _run(_log_sum_and_target, logits, target.flatten() - first)
            total, target_logit = _combine_over_ranks(own_total, own_target_logit, group, ranks)
            losses = torch.where(target >= 0, (total - target_logit).view_as(target), 0.0)
            factor = None if weights is None else weights[:, local_tokens]
            if factor is not None:
                losses = losses * factor
            loss += losses[rank].sum()
            if hidden_grad is None:
                continue
            if z_loss:
                squares += torch.where(target >= 0, total.square().view_as(target), 0.0)[rank].sum()
            factor = None if factor is None else factor.flatten()
            logits_grad = _run(_gradient, logits, target.flatten(), factor, total, first, z_loss)
            if derivative is not None:
                logits_grad *= derivative
            hidden_grad[local_tokens] = reduce_scatter_tokens((logits_grad @ weight)[None], group, ranks)[0]
            if weight_grad is not None:
                add_matmul(weight_grad, logits_grad.t(), tokens)
            elif ctx.needs_input_grad[1]:
                weight_grad = matmul(logits_grad.t(), tokens, wide)
            del logits, logits_grad, derivative  # otherwise the logits of two chunks would exist during the next matmul
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.mark_non_differentiable(squares)
        return loss, squares

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]  # torch's decorator hides the name of the first argument
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        loss_grad = grad_outputs[0]
        dtype = hidden_grad.dtype
        scaled_weight = None if weight_grad is None else scale(weight_grad, loss_grad, dtype)
        return scale(hidden_grad, loss_grad, dtype), scaled_weight, *[None] * 9


def _combine_over_ranks(total: Tensor, target_logit: Tensor, group: str, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp over the whole vocabulary and the target's logit, `(tokens,)` each, from the values of each rank."""
    local = torch.stack((total, target_logit))
    gathered = local.new_empty((ranks * 2, local.shape[1]))
    ALL_GATHER(gathered, local, group=group_by_name(group))
    totals, target_logits = gathered.unflatten(0, (ranks, 2)).unbind(1)
    return torch.logsumexp(totals, dim=0), target_logits.sum(0)


def _run(function: Any, *inputs: Any) -> Any:
    """Run a function of the logits, compiled to one kernel on a GPU and eager on a CPU."""
    return (compile_once(function) if inputs[0].is_cuda else function)(*inputs)


def _log_sum_and_target(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of logits `(tokens, rows)`, and the target's logit, which is 0 if its row is on another rank."""
    wide = logits.to(accumulate_dtype(logits.dtype))
    is_local = (targets >= 0) & (targets < logits.shape[-1])
    target_logit = wide.gather(-1, torch.where(is_local, targets, 0)[:, None])[:, 0]
    return torch.logsumexp(wide, dim=-1), torch.where(is_local, target_logit, 0.0)


def _gradient(
    logits: Tensor, targets: Tensor, weights: Tensor | None, total: Tensor, first: int, z_loss: float
) -> Tensor:
    """Return the gradient of weighted cross-entropy and z-loss with respect to logits `(tokens, rows)`. It overwrites the logits.

    `weights` `(tokens,)` multiply the cross-entropies; None means all are 1. `total` `(tokens,)` is the log-sum-exp over the whole
    vocabulary. `first` is the first row of the vocabulary on this rank.
    """
    wide = logits.to(accumulate_dtype(logits.dtype))
    is_target = torch.arange(logits.shape[-1], device=logits.device) + first == targets[:, None]
    factor = 1 if weights is None else weights[:, None]
    logits_grad = torch.exp(wide - total[:, None])
    if z_loss:
        logits_grad = logits_grad * (factor + 2 * z_loss * total[:, None])
    elif weights is not None:
        logits_grad = logits_grad * factor
    logits_grad = logits_grad - is_target.to(wide.dtype) * factor
    return logits.copy_(torch.where((targets >= 0)[:, None], logits_grad, 0.0))
