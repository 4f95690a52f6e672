"""The output projection and its cross-entropy in one function, computed by chunks of tokens, so that the logits of all tokens never exist.

The forward computes the loss of each chunk, and both gradients while the chunk's logits are in memory. The backward only multiplies these
gradients by the incoming gradient. So each chunk needs three matmuls, and none is computed twice.

If the vocabulary is not a multiple of 8 (GPT-2 has 50,257), rows do not begin at multiples of 16 bytes, and a GPU has only slow matmuls for
them. The weight is then padded once per call. Logits beyond the vocabulary are minus infinity, so they change neither the softmax nor a
gradient.

The z-loss (Chowdhery et al. 2022, §5) is a weight times the mean of squared log-sum-exps. It adds one factor per token to the gradient:
d(z · lse²) = 2 · z · lse · softmax.

Logits z with a cap c are c · tanh(z / c) (Gemma 2). The derivative of this is 1 - (logit / c)², where logit is the capped value.

If a loss is a function of all log-probabilities of a sequence, the factor of each token is known only after the last chunk. Then
`token_log_probabilities` computes the log-probabilities first, and `linear_cross_entropy` gets the factors as `weights`. This needs one
more matmul of the head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.kernels.fixed_matmul import fixed_linear
from meshwright.kernels.norm import accumulate_dtype
from meshwright.kernels.sums import add_matmul, matmul, scale

ALIGNED = 8
"""Rows must be aligned to 16 bytes for fast matmuls, which is this many elements of two bytes."""
TILE = 64
"""An unaligned vocabulary is padded to a multiple of this. Whole tiles take no more time than a multiple of 8."""


class LossSums(NamedTuple):
    """Sums over the tokens that a head is trained on, scalars in fp32 (fp64 for fp64 input).

    - `loss`: the cross-entropies, each multiplied by the weight of its token. The gradient of `loss` also contains the gradient of the
      z-loss.
    - `squares`: squared log-sum-exps, without gradient; 0 if the z-loss has no weight.
    """

    loss: Tensor
    squares: Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    *,
    weights: Tensor | None = None,
    cap: float | None = None,
    z_loss: float = 0.0,
    reference: bool = False,
) -> LossSums:
    """Return the summed losses of the tokens; negative targets are ignored.

    - hidden `(tokens, hidden)` and weight `(vocab, hidden)`: in the dtype in which they are multiplied.
    - targets `(tokens,)`.
    - `chunk`: number of tokens whose logits exist at a time.
    - `weights` `(tokens,)`: factors of the cross-entropies, not of the z-losses. They may be negative and have no gradient. None: all are
      1.
    - `cap`: bound of the logits. `z_loss`: weight of the z-loss.
    - `reference`: compute torch's cross-entropy over all logits at once.
    """
    if weights is not None:
        weights = weights.to(accumulate_dtype(hidden.dtype))
    if reference:
        logits = capped(F.linear(hidden, weight).to(accumulate_dtype(hidden.dtype)), cap)
        return _reference_sums(logits, targets, weights, z_loss)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return LossSums(*_LinearCrossEntropy.apply(hidden, weight, targets, weights, chunk, cap, z_loss))
    losses = -token_log_probabilities(hidden, weight, targets, chunk, cap=cap)
    losses = losses if weights is None else losses * weights
    loss = torch.stack([of_chunk.sum() for of_chunk in losses.split(chunk)]).sum()
    return LossSums(loss, torch.zeros_like(loss))


@torch.no_grad()
def token_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    *,
    cap: float | None = None,
    fixed_order: bool = False,
    reference: bool = False,
) -> Tensor:
    """Return the log-probability of each target `(tokens,)`, without gradient; 0 where the target is negative.

    The dtype is fp32 (fp64 for fp64 input). The arguments are as in `linear_cross_entropy`. With `fixed_order` on CUDA, the bits of a
    token's result do not depend on the other tokens, and are those that an invariant engine gives.
    """
    if reference:
        logits = capped(F.linear(hidden, weight).to(accumulate_dtype(hidden.dtype)), cap)
        return -F.cross_entropy(logits, targets.clamp_min(-1), ignore_index=-1, reduction="none")
    parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    if fixed_order:
        return torch.cat([log_probabilities_of_logits(capped(fixed_linear(h, weight), cap), t) for h, t in parts])
    vocab = weight.shape[0]
    weight = pad_vocabulary(weight)
    return torch.cat([log_probabilities_of_logits(_logits(h, weight, vocab, cap)[0], t) for h, t in parts])


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap · tanh(logits / cap), or the logits unchanged if there is no cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def cap_in_place(logits: Tensor, cap: float | None) -> Tensor | None:
    """Replace logits by capped logits. Returns the derivative, shaped like the logits, or None without a cap."""
    if cap is None:
        return None
    share = logits.div_(cap).tanh_()
    derivative = 1 - share.square()
    logits.mul_(cap)
    return derivative


def _reference_sums(logits: Tensor, targets: Tensor, weights: Tensor | None, z_loss: float) -> LossSums:
    if weights is None:
        loss = F.cross_entropy(logits, targets.clamp_min(-1), ignore_index=-1, reduction="sum")
    else:
        loss = (F.cross_entropy(logits, targets.clamp_min(-1), ignore_index=-1, reduction="none") * weights).sum()
    if not z_loss:
        return LossSums(loss, torch.zeros_like(loss))
    squares = torch.where(targets >= 0, logits.logsumexp(-1).square(), 0.0).sum()
    # The difference in brackets is 0, so the z-loss changes the gradient only.
    return LossSums(loss + z_loss * (squares - squares.detach()), squares.detach())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        chunk: int,
        cap: float | None,
        z_loss: float,
    ) -> tuple[Tensor, Tensor]:
        wide = accumulate_dtype(hidden.dtype)
        sums_and_gradient = _gradient_fused if hidden.is_cuda and hidden.element_size() <= 4 else _gradient_eager
        loss, squares = (torch.zeros((), dtype=wide, device=hidden.device) for _ in range(2))
        hidden_grad = torch.empty_like(hidden)
        vocab = weight.shape[0]
        weight = pad_vocabulary(weight)
        weight_grad: Tensor | None = None
        parts = (hidden.split(chunk), hidden_grad.split(chunk), targets.split(chunk))
        of_parts = [None] * len(parts[0]) if weights is None else weights.split(chunk)
        for h, h_grad, t, w in zip(*parts, of_parts, strict=True):
            logits, derivative = _logits(h, weight, vocab, cap)
            sums, logits_grad = sums_and_gradient(logits, t, z_loss, w)
            if derivative is not None:
                logits_grad *= derivative
            loss += sums.loss
            if z_loss:
                squares += sums.squares
            torch.mm(logits_grad, weight, out=h_grad)
            if weight_grad is not None:
                add_matmul(weight_grad, logits_grad.t(), h)
            elif ctx.needs_input_grad[1]:
                weight_grad = matmul(logits_grad.t(), h, wide)
            # Otherwise the logits of two chunks would be in memory during the next matmul.
            del logits, logits_grad, derivative
        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad[:vocab])
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
        return scale(hidden_grad, loss_grad, dtype), scaled_weight, *[None] * 5


def pad_vocabulary(weight: Tensor) -> Tensor:
    """Return `weight` `(vocab, hidden)` unchanged if its rows are aligned, otherwise a copy padded with rows of zeros."""
    vocab = weight.shape[0]
    return weight if vocab % ALIGNED == 0 else F.pad(weight, (0, 0, 0, -vocab % TILE))


def _logits(hidden: Tensor, weight: Tensor, vocab: int, cap: float | None = None) -> tuple[Tensor, Tensor | None]:
    """Logits `(tokens, rows of weight)`, and the derivative of their cap, if any.

    Columns from `vocab` on are minus infinity, with weight and gradient 0.
    """
    logits = hidden @ weight.t()
    derivative = cap_in_place(logits, cap)
    if vocab < weight.shape[0]:
        logits[:, vocab:] = -torch.inf
    return logits, derivative


def log_probabilities_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities `(tokens,)` of the targets by logits `(tokens, vocab)`; 0 where the target is negative.

    On CUDA one kernel computes them, and the bits of a row's result do not depend on the other rows.
    """
    if logits.is_cuda and logits.element_size() <= 4:
        from meshwright.kernels.loss_triton import log_probabilities

        return log_probabilities(logits, targets)
    wide = logits.to(accumulate_dtype(logits.dtype))
    target_logit = wide.gather(-1, targets.clamp_min(0)[:, None])[:, 0]
    return torch.where(targets >= 0, target_logit - torch.logsumexp(wide, dim=-1), 0.0)


def _gradient_fused(
    logits: Tensor, targets: Tensor, z_loss: float = 0.0, weights: Tensor | None = None
) -> tuple[LossSums, Tensor]:
    """The sums of logits `(tokens, vocab)` and the gradient, written over the logits, in one kernel.

    torch.compile would generate a reduction and another pass over all logits: 1.57 ms for 4,096 tokens of 128,256 logits on an H200.
    """
    from meshwright.kernels.loss_triton import gradient_in_place

    losses, squares = gradient_in_place(logits, targets, z_loss, weights)
    return LossSums(losses.sum(), squares.sum() if z_loss else squares), logits


def _gradient_eager(
    logits: Tensor, targets: Tensor, z_loss: float = 0.0, weights: Tensor | None = None
) -> tuple[LossSums, Tensor]:
    """Return losses and gradient by few eager kernels; a buffer is converted in place from log-probabilities to the gradient."""
    buffer = torch.log_softmax(logits, dim=-1, dtype=accumulate_dtype(logits.dtype))
    column = targets.clamp_min(0)[:, None]
    valid = (targets >= 0)[:, None].to(buffer.dtype)
    factor = valid if weights is None else weights[:, None] * valid
    target_log = buffer.gather(-1, column)
    loss = -(target_log * factor).sum()
    squares = buffer.new_zeros(())
    buffer.exp_()
    if z_loss:
        total = (logits.gather(-1, column) - target_log) * valid
        squares = total.square().sum()
        buffer.mul_(factor + 2 * z_loss * total)
    else:
        buffer.mul_(factor)
    buffer.scatter_add_(-1, column, -factor)
    return LossSums(loss, squares), buffer.to(logits.dtype)
