"""Embedding, head and loss with the vocabulary divided over tensor ranks (Shoeybi et al. 2019, §3), in token chunks.

2019, §3), a chunk of tokens at a time.

A rank sees every token and its own rows of the vocabulary. Logits are not exchanged in training: a chunk's
cross-entropy needs each rank's log-sum and the target's logit, two numbers a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.kernels.loss import compile_once
from meshwright.kernels.norm import accumulate_dtype
from meshwright.kernels.sums import add_product, matmul, scale
from meshwright.models.decoder import Embedding, Head
from meshwright.parallel.products import ALL_GATHER, gathered_tokens, group_by_name, scattered_sum


class VocabularyEmbedding(Embedding):
    """Rows [first, …) of a token table; gives this rank's part of the sequence."""

    def __init__(self, weight: nn.Parameter, first: int, group: str, ranks: int) -> None:
        super().__init__(weight)
        self.first, self.group, self.ranks = first, group, ranks

    def forward(self, indices: Tensor) -> Tensor:
        """`(batch, seq / ranks, hidden)` of tokens `(batch, seq)`."""
        mine, held = indices - self.first, self.weight.shape[0]
        elsewhere = (mine < 0) | (mine >= held)
        # Any row will do for the others' tokens; spread over all, their (zero) gradients do not queue up at one.
        found = F.embedding(mine.remainder(held), self.weight)
        # One rank has the token and the others add zeros: the sum is exact.
        return _Scattered.apply(found.masked_fill(elsewhere[..., None], 0.0), self.group, self.ranks)


class PositionEmbedding(Embedding):
    """Learned positions, whole on every rank, looked up for this rank's part of the sequence."""

    def __init__(self, weight: nn.Parameter, rank: int, ranks: int) -> None:
        super().__init__(weight)
        self.rank, self.ranks = rank, ranks

    def forward(self, indices: Tensor) -> Tensor:
        """`(…, seq / ranks, hidden)` of positions `(…, seq)`."""
        return F.embedding(indices.chunk(self.ranks, dim=-1)[self.rank], self.weight)


class VocabularyHead(Head):
    """The product with this rank's rows of the vocabulary and, given targets, the loss of this rank's part of the sequence.

    `sizes` are the rows of each rank. `weight` is None for a tied head.
    """

    def __init__(
        self, weight: nn.Parameter | None, sizes: tuple[int, ...], loss_chunk: int, rank: int, group: str
    ) -> None:
        super().__init__(weight, loss_chunk)
        self.sizes, self.rank, self.group = sizes, rank, group

    def forward(self, hidden: Tensor, targets: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        """Logits `(batch, seq, vocab)` of hidden `(batch, seq / ranks, hidden)`, or the loss, whose sum over ranks is the batch's."""
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head is handed the embedding's weight"
        if targets is None:
            return self._logits(hidden, weight)
        # Rank by rank, as chunks are gathered.
        ranked = targets.unflatten(1, (len(self.sizes), -1)).transpose(0, 1).flatten(1)
        return _LinearCrossEntropy.apply(
            hidden.flatten(0, 1),
            weight,
            ranked,
            self.loss_chunk,
            self.sizes,
            self.rank,
            self.group,
            torch.is_grad_enabled(),
        )

    def _logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        ranks, longest = len(self.sizes), max(self.sizes)
        mine = F.pad(F.linear(gathered_tokens(hidden, self.group, ranks), weight), (0, longest - weight.shape[0]))
        found = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(found, mine, group=group_by_name(self.group))
        return torch.cat([part[..., :size] for part, size in zip(found, self.sizes, strict=True)], dim=-1)


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return scattered_sum(x, group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gathered_tokens(grad, ctx.group, ctx.ranks), None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """`kernels.loss` over a divided vocabulary: both gradients are made in forward, while a chunk's logits are at hand.

    A chunk is made of the same places of every rank's tokens. Only losses are made unless it `trains`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, sizes: tuple[int, ...], rank: int, group: str,
        trains: bool,
    ) -> Tensor:  # fmt: skip
        wide, ranks, first = accumulate_dtype(hidden.dtype), len(sizes), sum(sizes[:rank])
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if trains else None
        weight_grad: Tensor | None = None
        part = max(1, chunk // ranks)
        for start in range(0, hidden.shape[0], part):
            mine = slice(start, start + part)
            tokens = gathered_tokens(hidden[None, mine], group, ranks)[0]
            target = targets[:, mine]
            logits = tokens @ weight.t()
            own, own_picked = _run(_log_sum_and_target, logits, target.flatten() - first)
            total, picked = _over_ranks(own, own_picked, group, ranks)
            losses = torch.where(target >= 0, (total - picked).view_as(target), 0.0)
            loss += losses[rank].sum()
            if hidden_grad is None:
                continue
            slope = _run(_gradient, logits, target.flatten(), total, first)
            hidden_grad[mine] = scattered_sum((slope @ weight)[None], group, ranks)[0]
            if weight_grad is not None:
                add_product(weight_grad, slope.t(), tokens)
            elif ctx.needs_input_grad[1]:
                weight_grad = matmul(slope.t(), tokens, wide)
            del logits, slope  # else two chunks' logits would be alive when the next product is made
        ctx.save_for_backward(hidden_grad, weight_grad)
        return loss

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]  # torch's decorator hides the name of the first argument
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        by, dtype = grad_outputs[0], hidden_grad.dtype
        scaled_weight = None if weight_grad is None else scale(weight_grad, by, dtype)
        return scale(hidden_grad, by, dtype), scaled_weight, *[None] * 6


def _over_ranks(total: Tensor, picked: Tensor, group: str, ranks: int) -> tuple[Tensor, Tensor]:
    """The log-sum over the whole vocabulary and the target's logit, of each rank's `(tokens,)`."""
    mine = torch.stack((total, picked))
    found = mine.new_empty((ranks * 2, mine.shape[1]))
    ALL_GATHER(found, mine, group=group_by_name(group))
    totals, pickeds = found.unflatten(0, (ranks, 2)).unbind(1)
    return torch.logsumexp(totals, dim=0), pickeds.sum(0)


def _run(function: Any, *inputs: Any) -> Any:
    """One pass over the logits on a GPU, eager operators on a CPU."""
    return (compile_once(function) if inputs[0].is_cuda else function)(*inputs)


def _log_sum_and_target(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum of logits `(tokens, rows)`, and the logit of the target where its row is one of these; 0 elsewhere."""
    wide = logits.to(accumulate_dtype(logits.dtype))
    here = (targets >= 0) & (targets < logits.shape[-1])
    picked = wide.gather(-1, torch.where(here, targets, 0)[:, None])[:, 0]
    return torch.logsumexp(wide, dim=-1), torch.where(here, picked, 0.0)


def _gradient(logits: Tensor, targets: Tensor, total: Tensor, first: int) -> Tensor:
    """The loss's gradient by logits `(tokens, rows)` whose first row is number `first` of the vocabulary; written over them."""
    wide = logits.to(accumulate_dtype(logits.dtype))
    is_target = torch.arange(logits.shape[-1], device=logits.device) + first == targets[:, None]
    slope = torch.exp(wide - total[:, None]) - is_target.to(wide.dtype)
    return logits.copy_(torch.where((targets >= 0)[:, None], slope, 0.0))
