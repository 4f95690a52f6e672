"""Matmuls of tensor-parallel linear layers, after an all-gather or before a reduce-scatter of tokens.

Between linear layers a tensor rank has its part of every sequence. Inside a linear layer it has all tokens and its part of the features
(Shoeybi et al. 2019, Korthikanti et al. 2022). Each matmul is one custom operator together with its collectives, so that a compiled block
stays one graph and the compiler neither reorders nor saves the gathered tokens.

Backward gathers the tokens again, so a rank saves only its own part of the sequence. In backward a collective overlaps with the matmul that
does not depend on it. If the group has peers (`parallel.peers`), an operator calls its asynchronous variant (`parallel.async_tensor`).

Layers with the same input share one all-gather, and layers whose outputs are added share one reduce-scatter. The operators therefore have
lists as arguments.

Shapes: `all_gather_matmul` maps x `(batch, seq / ranks, in)` to `(batch, seq, out)`; `matmul_reduce_scatter` maps
`(batch, seq, in)` to `(batch, seq / ranks, out)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from meshwright.kernels.linear import Linear
from meshwright.parallel import async_tensor
from meshwright.parallel.async_tensor import sum_of_outputs, weight_gradient
from meshwright.parallel.peers import Peers, peers_of

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 renamed these functions and warns about the names of 2.11."""


class GroupedLinear(Linear):
    """This tensor rank's part of a linear layer.

    `group` is the name of the tensor ranks' process group. The layer references `peers` only to keep them alive; the operators look them up
    by the group's name.
    """

    def __init__(self, linear: Linear, group: str, ranks: int, peers: Peers | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = linear.weight.shape
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(linear, name))
        self.adapter = linear.adapter
        self.group = group
        self.tokens_per_input_token = ranks
        self.peers = peers


class GatheredLinear(GroupedLinear):
    """A linear layer divided by output features: all-gathers the ranks' parts of the sequence before the matmul."""

    def forward(self, x: Tensor) -> Tensor:
        """Return y `(batch, seq, out)` for x `(batch, seq / ranks, in)`."""
        return gather_and_multiply([self], x)[0]


class ScatteredLinear(GroupedLinear):
    """A linear layer divided by input features: reduce-scatters the outputs along the sequence after the matmul.

    The weight is divided over the ranks; every rank has the whole bias.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return y `(batch, seq / ranks, out)` for x `(batch, seq, in)`."""
        return multiply_and_scatter([self], [x])


def gather_and_multiply(linears: Sequence[GroupedLinear], x: Tensor) -> Sequence[Tensor]:
    """Return the output `(batch, seq, out)` of each layer for x `(batch, seq / ranks, in)`, with one all-gather.

    The adapter of a layer multiplies this rank's own tokens by A and all-gathers the product, which is only as wide as the adapter's rank.
    Every rank has the whole A, and its gradient of A comes from its own tokens only.
    """
    group = linears[0].group
    ranks = linears[0].tokens_per_input_token
    if not torch.is_grad_enabled():
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
        outputs = all_gather_matmul(x, weights, biases, group, ranks)
    else:
        parts = ((linear.weight, linear.bias, *(linear.taps or (None, None))) for linear in linears)
        outputs = _AllGatherMatmul.apply(x, group, ranks, *chain.from_iterable(parts))
    return [
        y
        if linear.adapter is None
        else linear.adapter.add_to(y, gather_tokens(linear.adapter.reduced(x), group, ranks))
        for linear, y in zip(linears, outputs, strict=True)
    ]


def multiply_and_scatter(linears: Sequence[GroupedLinear], xs: Sequence[Tensor]) -> Tensor:
    """Return the sum `(batch, seq / ranks, out)` of the layers' outputs, with one reduce-scatter.

    The input of layer i is xs[i] `(batch, seq, in)`. The adapter of a layer multiplies all tokens' part of the features by A and
    reduce-scatters the product, which is only as wide as the adapter's rank. Every rank has the whole B, and its gradient of B comes from
    its own tokens only.
    """
    group = linears[0].group
    ranks = linears[0].tokens_per_input_token
    if torch.is_grad_enabled():
        parts = ((x, linear.weight, *(linear.taps or (None, None))) for linear, x in zip(linears, xs, strict=True))
        y = _MatmulReduceScatter.apply(group, ranks, *chain.from_iterable(parts))
    else:
        y = matmul_reduce_scatter(list(xs), [linear.weight for linear in linears], group, ranks)
    for linear, x in zip(linears, xs, strict=True):
        if linear.adapter is not None:
            y = linear.adapter.add_to(y, scatter_tokens(linear.adapter.reduced(x), group, ranks))
        y = y if linear.bias is None else y + linear.bias
    return y


def gather_tokens(x: Tensor, group: str, ranks: int) -> Tensor:
    """All-gather x `(batch, seq / ranks, …)` along the sequence; backward sums the gradients over ranks."""
    return _GatherTokens.apply(x, group, ranks)


def scatter_tokens(x: Tensor, group: str, ranks: int) -> Tensor:
    """Reduce-scatter x `(batch, seq, …)` along the sequence; backward gathers the gradients of all ranks' tokens."""
    return _ScatterTokens.apply(x, group, ranks)


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group = group
        ctx.ranks = ranks
        return reduce_scatter_tokens(x, group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_tokens(grad, ctx.group, ctx.ranks), None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int) -> Tensor:
        ctx.group = group
        ctx.ranks = ranks
        return all_gather_tokens(x, group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_tokens(grad, ctx.group, ctx.ranks), None, None


class _AllGatherMatmul(torch.autograd.Function):
    """Autograd of `gather_and_multiply`; `parts` has weight, bias, output tap and input tap of each layer, one after another.

    Taps are extra inputs (`kernels.linear`). With taps the backward does not compute weight gradients. It returns the output gradient and
    the gathered tokens as the gradients of the taps, and the executor multiplies these two later.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int, *parts: Any) -> tuple[Tensor, ...]:
        weights = parts[::4]
        biases = parts[1::4]
        ctx.save_for_backward(x, *weights)
        ctx.tapped = parts[2] is not None
        ctx.biased = biases[0] is not None
        ctx.group = group
        ctx.ranks = ranks
        return tuple(all_gather_matmul(x, list(weights), list(biases), group, ranks))

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        bias_grads = [grad.flatten(0, -2).sum(0) if ctx.biased else None for grad in grads]
        frozen = not any(ctx.needs_input_grad[3::4])
        if ctx.tapped or frozen:
            x_grad, tokens = all_gather_matmul_input_backward(x, weights, list(grads), ctx.group, ctx.ranks)
            taps = [(grad, tokens) if ctx.tapped else (None, None) for grad in grads]
            parts = [(None, bias, *tap) for bias, tap in zip(bias_grads, taps, strict=True)]
        else:
            x_grad, weight_grads = all_gather_matmul_backward(x, weights, list(grads), ctx.group, ctx.ranks)
            parts = [(weight, bias, None, None) for weight, bias in zip(weight_grads, bias_grads, strict=True)]
        return x_grad, None, None, *chain.from_iterable(parts)


class _MatmulReduceScatter(torch.autograd.Function):
    """Autograd of `multiply_and_scatter`; `parts` has x, weight, output tap and input tap of each layer, one after another."""

    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, *parts: Any) -> Tensor:
        xs = parts[::4]
        weights = parts[1::4]
        ctx.save_for_backward(*chain.from_iterable(zip(xs, weights, strict=True)))
        ctx.tapped = parts[2] is not None
        ctx.group = group
        ctx.ranks = ranks
        return matmul_reduce_scatter(list(xs), list(weights), group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing returns a recomputed tensor only once
        xs = saved[::2]
        weights = saved[1::2]
        x_grads, whole_grad = matmul_reduce_scatter_input_backward(grad, list(weights), ctx.group, ctx.ranks)
        if ctx.tapped:
            parts = [(x_grad, None, whole_grad, x) for x_grad, x in zip(x_grads, xs, strict=True)]
        elif not any(ctx.needs_input_grad[3::4]):
            parts = [(x_grad, None, None, None) for x_grad in x_grads]
        else:
            parts = [
                (x_grad, weight_gradient(whole_grad, x), None, None) for x_grad, x in zip(x_grads, xs, strict=True)
            ]
        return None, None, *chain.from_iterable(parts)


@torch.library.custom_op("meshwright::all_gather_tokens", mutates_args=())
def all_gather_tokens(x: Tensor, group: str, ranks: int) -> Tensor:
    """All-gather x `(batch, seq / ranks, …)` along the sequence: `(batch, seq, …)`."""
    return _gather(x, group, ranks).wait()


@all_gather_tokens.register_fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return _empty_gathered(x, x.shape[-1], ranks)


@torch.library.custom_op("meshwright::reduce_scatter_tokens", mutates_args=())
def reduce_scatter_tokens(x: Tensor, group: str, ranks: int) -> Tensor:
    """Reduce-scatter x `(batch, seq, …)` along the sequence: `(batch, seq / ranks, …)`."""
    return _scatter(x, group, ranks).wait()


@reduce_scatter_tokens.register_fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return _empty_scattered(x, x.shape[-1], ranks)


@torch.library.custom_op("meshwright::all_gather_matmul", mutates_args=())
def all_gather_matmul(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], group: str, ranks: int
) -> list[Tensor]:
    """all-gather(x) · weightᵀ + bias for each weight."""
    if peers := peers_of(group):
        return async_tensor.all_gather_matmul(peers, x, weights, biases)
    tokens = _gather(x, group, ranks).wait()
    return [F.linear(tokens, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


@all_gather_matmul.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], group: str, ranks: int) -> list[Tensor]:
    return [_empty_gathered(x, weight.shape[0], ranks) for weight in weights]


@torch.library.custom_op("meshwright::all_gather_matmul_backward", mutates_args=())
def all_gather_matmul_backward(
    x: Tensor, weights: list[Tensor], grads: list[Tensor], group: str, ranks: int
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of x and of the weights of `all_gather_matmul`, from its output gradients."""
    if peers := peers_of(group):
        return async_tensor.all_gather_matmul_backward(peers, x, weights, grads)
    tokens = _gather(x, group, ranks, asynchronous=True)
    x_grad_sum = sum_of_outputs(grads, weights)  # overlaps with the all-gather
    x_grad = _scatter(x_grad_sum, group, ranks, asynchronous=True)
    whole = tokens.wait()
    weight_grads = [weight_gradient(grad, whole) for grad in grads]  # overlap with the reduce-scatter
    return x_grad.wait(), weight_grads


@all_gather_matmul_backward.register_fake
def _(x: Tensor, weights: list[Tensor], grads: list[Tensor], group: str, ranks: int) -> tuple[Tensor, list[Tensor]]:
    weight_grads = [torch.empty_like(weight, memory_format=torch.contiguous_format) for weight in weights]
    return _empty_scattered(grads[0], x.shape[-1], ranks), weight_grads


@torch.library.custom_op("meshwright::all_gather_matmul_input_backward", mutates_args=())
def all_gather_matmul_input_backward(
    x: Tensor, weights: list[Tensor], grads: list[Tensor], group: str, ranks: int
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the input x of `all_gather_matmul`, and the gathered tokens, which later give the weight gradients."""
    if peers := peers_of(group):
        return async_tensor.all_gather_matmul_input_backward(peers, x, weights, grads)
    tokens = _gather(x, group, ranks, asynchronous=True)
    x_grad = _scatter(sum_of_outputs(grads, weights), group, ranks)
    return x_grad.wait(), tokens.wait()


@all_gather_matmul_input_backward.register_fake
def _(x: Tensor, weights: list[Tensor], grads: list[Tensor], group: str, ranks: int) -> tuple[Tensor, Tensor]:
    return _empty_scattered(grads[0], x.shape[-1], ranks), _empty_gathered(x, x.shape[-1], ranks)


@torch.library.custom_op("meshwright::matmul_reduce_scatter", mutates_args=())
def matmul_reduce_scatter(xs: list[Tensor], weights: list[Tensor], group: str, ranks: int) -> Tensor:
    """This rank's tokens of Σ x · weightᵀ over all xs and all ranks."""
    transposed = [weight.t() for weight in weights]
    if peers := peers_of(group):
        return async_tensor.matmul_reduce_scatter(peers, xs, transposed)
    return _scatter(sum_of_outputs(xs, transposed), group, ranks).wait()


@matmul_reduce_scatter.register_fake
def _(xs: list[Tensor], weights: list[Tensor], group: str, ranks: int) -> Tensor:
    return _empty_scattered(xs[0], weights[0].shape[0], ranks)


@torch.library.custom_op("meshwright::matmul_reduce_scatter_input_backward", mutates_args=())
def matmul_reduce_scatter_input_backward(
    grad: Tensor, weights: list[Tensor], group: str, ranks: int
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of the inputs of `matmul_reduce_scatter`, and the gathered output gradient for the weight gradients."""
    if peers := peers_of(group):
        return async_tensor.matmul_reduce_scatter_input_backward(peers, grad, weights)
    whole_grad = _gather(grad, group, ranks).wait()
    return [whole_grad @ weight for weight in weights], whole_grad


@matmul_reduce_scatter_input_backward.register_fake
def _(grad: Tensor, weights: list[Tensor], group: str, ranks: int) -> tuple[list[Tensor], Tensor]:
    return [_empty_gathered(grad, weight.shape[1], ranks) for weight in weights], _empty_gathered(
        grad, grad.shape[-1], ranks
    )


class _PendingTokens(NamedTuple):
    """The output of a collective that may still run. The buffer has the tokens of `ranks` ranks, one rank after another."""

    buffer: Tensor
    ranks: int
    work: Any = None
    """The running collective. None after a synchronous call, which already made the compute stream wait for it."""

    def wait(self) -> Tensor:
        """Make the compute stream wait and return the tokens in sequence order."""
        if self.work is not None:
            self.work.wait()
        if self.ranks == 1:
            return self.buffer
        ranked = self.buffer.unflatten(0, (self.ranks, -1))  # (ranks, batch, seq / ranks, …)
        return ranked.transpose(0, 1).flatten(1, 2)


def _gather(x: Tensor, group: str, ranks: int, *, asynchronous: bool = False) -> _PendingTokens:
    """Start an all-gather; with `asynchronous` it overlaps with compute until `wait`."""
    x = x.contiguous()
    buffer = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    return _PendingTokens(buffer, ranks, ALL_GATHER(buffer, x, group=group_by_name(group), async_op=asynchronous))


def _scatter(x: Tensor, group: str, ranks: int, *, asynchronous: bool = False) -> _PendingTokens:
    """Start a reduce-scatter; `asynchronous` as in `_gather`."""
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()  # (ranks, batch, seq / ranks, …)
    buffer = parts.new_empty(parts.shape[1:])
    work = REDUCE_SCATTER(buffer, parts.flatten(0, 1), group=group_by_name(group), async_op=asynchronous)
    return _PendingTokens(buffer, 1, work)


def group_by_name(name: str) -> dist.ProcessGroup:
    """The process group with this name; custom operators and compiled graphs take names, not group objects."""
    return _resolve_process_group(GroupName(name))


def _empty_gathered(x: Tensor, width: int, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] * ranks, *x.shape[2:-1], width))


def _empty_scattered(x: Tensor, width: int, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // ranks, *x.shape[2:-1], width))
