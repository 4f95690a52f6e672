"""Matrix products of tensor-parallel linear layers, with an all-gather before or a reduce-scatter after.

Between products a tensor rank has its part of every sequence; inside, all tokens and its part of the features (Shoeybi
et al. 2019, Korthikanti et al. 2022). Each product is one operator together with its collectives, so that a compiled
block stays one graph and the compiler neither moves nor keeps what was gathered. Backward gathers the tokens anew: a
block then leaves a rank its own part of the sequence only. In backward a collective runs beside the product that does
not wait for it. Where the ranks' group has peers (`parallel.peers`), an operator has its asynchronous twin do the work
(`parallel.async_tensor`).

Products of one input share its gather, and products that are added up share their scatter: operators take as many as
there are.

Shapes: x `(batch, seq / ranks, in)` becomes `(batch, seq, out)` behind a gathered product; behind a scattered one
`(batch, seq, in)` becomes `(batch, seq / ranks, out)`.
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
from meshwright.parallel.async_tensor import sum_of_products, weight_gradient
from meshwright.parallel.peers import Peers, peers_of

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Under their names of torch 2.13, which warns of those of 2.11."""


class GroupedLinear(Linear):
    """This tensor rank's part of a linear layer; takes over its weight and bias. `group` names the tensor ranks.

    `peers` are kept alive for the group's operators.
    """

    def __init__(self, linear: nn.Linear, group: str, ranks: int, peers: Peers | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = linear.weight.shape
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(linear, name))
        self.group, self.tokens_per_input_token, self.peers = group, ranks, peers


class GatheredLinear(GroupedLinear):
    """Some output features of a linear layer, for all tokens of the sequence it is given a part of."""

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, seq, out)` of x `(batch, seq / ranks, in)`."""
        return gathered([self], x)[0]


class ScatteredLinear(GroupedLinear):
    """Some input features of a linear layer: sums its ranks' products and keeps a part of the sequence. Its bias is whole."""

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, seq / ranks, out)` of x `(batch, seq, in)`."""
        return scattered([self], [x])


def gathered(linears: Sequence[GroupedLinear], x: Tensor) -> Sequence[Tensor]:
    """What each of `linears` makes of x, `(batch, seq, out)` of `(batch, seq / ranks, in)`, from one gather."""
    group, ranks = linears[0].group, linears[0].tokens_per_input_token
    if not torch.is_grad_enabled():
        return gathered_products(x, [one.weight for one in linears], [one.bias for one in linears], group, ranks)
    parts = ((one.weight, one.bias, *(one.taps or (None, None))) for one in linears)
    return _Gathered.apply(x, group, ranks, *chain.from_iterable(parts))


def scattered(linears: Sequence[GroupedLinear], xs: Sequence[Tensor]) -> Tensor:
    """The sum of what `linears` make of an x `(batch, seq, in)` each, `(batch, seq / ranks, out)`, by one scatter."""
    group, ranks = linears[0].group, linears[0].tokens_per_input_token
    if torch.is_grad_enabled():
        parts = ((x, one.weight, *(one.taps or (None, None))) for one, x in zip(linears, xs, strict=True))
        y = _Scattered.apply(group, ranks, *chain.from_iterable(parts))
    else:
        y = scattered_products(list(xs), [one.weight for one in linears], group, ranks)
    for one in linears:
        y = y if one.bias is None else y + one.bias
    return y


class _Gathered(torch.autograd.Function):
    """Gradients of x and of each product's weight, bias, output tap and input tap.

    With taps (`kernels.linear`) the taps get dY and the gathered tokens, in place of the weight's gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ranks: int, *parts: Any) -> tuple[Tensor, ...]:
        weights, biases = parts[::4], parts[1::4]
        ctx.save_for_backward(x, *weights)
        ctx.tapped, ctx.biased, ctx.group, ctx.ranks = parts[2] is not None, biases[0] is not None, group, ranks
        return tuple(gathered_products(x, list(weights), list(biases), group, ranks))

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        bias_grads = [grad.flatten(0, -2).sum(0) if ctx.biased else None for grad in grads]
        if ctx.tapped:
            x_grad, tokens = gathered_input_gradient(x, weights, list(grads), ctx.group, ctx.ranks)
            parts = [(None, bias, grad, tokens) for bias, grad in zip(bias_grads, grads, strict=True)]
        else:
            x_grad, weight_grads = gathered_gradients(x, weights, list(grads), ctx.group, ctx.ranks)
            parts = [(weight, bias, None, None) for weight, bias in zip(weight_grads, bias_grads, strict=True)]
        return x_grad, None, None, *chain.from_iterable(parts)


class _Scattered(torch.autograd.Function):
    """Of each product's x, weight, output tap and input tap."""

    @staticmethod
    def forward(ctx: Any, group: str, ranks: int, *parts: Any) -> Tensor:
        xs, weights = parts[::4], parts[1::4]
        ctx.save_for_backward(*chain.from_iterable(zip(xs, weights, strict=True)))
        ctx.tapped, ctx.group, ctx.ranks = parts[2] is not None, group, ranks
        return scattered_products(list(xs), list(weights), group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # once: what a checkpoint made again it gives once
        xs, weights = kept[::2], kept[1::2]
        x_grads, whole = scattered_input_gradients(grad, list(weights), ctx.group, ctx.ranks)
        if ctx.tapped:
            parts = [(x_grad, None, whole, x) for x_grad, x in zip(x_grads, xs, strict=True)]
        else:
            parts = [(x_grad, weight_gradient(whole, x), None, None) for x_grad, x in zip(x_grads, xs, strict=True)]
        return None, None, *chain.from_iterable(parts)


@torch.library.custom_op("meshwright::gathered_tokens", mutates_args=())
def gathered_tokens(x: Tensor, group: str, ranks: int) -> Tensor:
    """All tokens `(batch, seq, …)` of every rank's `(batch, seq / ranks, …)`."""
    return _gather(x, group, ranks).wait()


@gathered_tokens.register_fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return _longer(x, x.shape[-1], ranks)


@torch.library.custom_op("meshwright::scattered_sum", mutates_args=())
def scattered_sum(x: Tensor, group: str, ranks: int) -> Tensor:
    """The ranks' sum of x `(batch, seq, …)`, and of it this rank's `(batch, seq / ranks, …)`."""
    return _scatter(x, group, ranks).wait()


@scattered_sum.register_fake
def _(x: Tensor, group: str, ranks: int) -> Tensor:
    return _shorter(x, x.shape[-1], ranks)


@torch.library.custom_op("meshwright::gathered_products", mutates_args=())
def gathered_products(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], group: str, ranks: int
) -> list[Tensor]:
    """gathered(x) · weightᵀ + bias of each."""
    if peers := peers_of(group):
        return async_tensor.gathered_products(peers, x, weights, biases)
    tokens = _gather(x, group, ranks).wait()
    return [F.linear(tokens, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


@gathered_products.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], group: str, ranks: int) -> list[Tensor]:
    return [_longer(x, weight.shape[0], ranks) for weight in weights]


@torch.library.custom_op("meshwright::gathered_gradients", mutates_args=())
def gathered_gradients(
    x: Tensor, weights: list[Tensor], grads: list[Tensor], group: str, ranks: int
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of x and of the weights, of gathered products' output gradients."""
    if peers := peers_of(group):
        return async_tensor.gathered_gradients(peers, x, weights, grads)
    tokens = _gather(x, group, ranks, asynchronous=True)
    x_grad = _scatter(
        sum_of_products(grads, weights), group, ranks, asynchronous=True
    )  # the products beside the gather
    whole = tokens.wait()
    weight_grads = [weight_gradient(grad, whole) for grad in grads]  # and these beside the scatter
    return x_grad.wait(), weight_grads


@gathered_gradients.register_fake
def _(x: Tensor, weights: list[Tensor], grads: list[Tensor], group: str, ranks: int) -> tuple[Tensor, list[Tensor]]:
    made = [torch.empty_like(weight, memory_format=torch.contiguous_format) for weight in weights]
    return _shorter(grads[0], x.shape[-1], ranks), made


@torch.library.custom_op("meshwright::gathered_input_gradient", mutates_args=())
def gathered_input_gradient(
    x: Tensor, weights: list[Tensor], grads: list[Tensor], group: str, ranks: int
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and the gathered tokens that the weights' will need."""
    if peers := peers_of(group):
        return async_tensor.gathered_input_gradient(peers, x, weights, grads)
    tokens = _gather(x, group, ranks, asynchronous=True)
    x_grad = _scatter(sum_of_products(grads, weights), group, ranks)
    return x_grad.wait(), tokens.wait()


@gathered_input_gradient.register_fake
def _(x: Tensor, weights: list[Tensor], grads: list[Tensor], group: str, ranks: int) -> tuple[Tensor, Tensor]:
    return _shorter(grads[0], x.shape[-1], ranks), _longer(x, x.shape[-1], ranks)


@torch.library.custom_op("meshwright::scattered_products", mutates_args=())
def scattered_products(xs: list[Tensor], weights: list[Tensor], group: str, ranks: int) -> Tensor:
    """This rank's tokens of the ranks' sum of every x · weightᵀ."""
    turned = [weight.t() for weight in weights]
    if peers := peers_of(group):
        return async_tensor.scattered_products(peers, xs, turned)
    return _scatter(sum_of_products(xs, turned), group, ranks).wait()


@scattered_products.register_fake
def _(xs: list[Tensor], weights: list[Tensor], group: str, ranks: int) -> Tensor:
    return _shorter(xs[0], weights[0].shape[0], ranks)


@torch.library.custom_op("meshwright::scattered_input_gradients", mutates_args=())
def scattered_input_gradients(
    grad: Tensor, weights: list[Tensor], group: str, ranks: int
) -> tuple[list[Tensor], Tensor]:
    """The gradients of scattered products' inputs, and the gathered output gradient that the weights' will need."""
    if peers := peers_of(group):
        return async_tensor.scattered_input_gradients(peers, grad, weights)
    whole = _gather(grad, group, ranks).wait()
    return [whole @ weight for weight in weights], whole


@scattered_input_gradients.register_fake
def _(grad: Tensor, weights: list[Tensor], group: str, ranks: int) -> tuple[list[Tensor], Tensor]:
    return [_longer(grad, weight.shape[1], ranks) for weight in weights], _longer(grad, grad.shape[-1], ranks)


class _Moving(NamedTuple):
    """What a collective makes, maybe still on its way: tokens of `ranks` ranks, one rank's behind another's."""

    buffer: Tensor
    ranks: int
    work: Any = None
    """None where compute was made to wait at once, without a stream of its own."""

    def wait(self) -> Tensor:
        """The tokens in order; with one sequence in a micro-batch they lie in order already."""
        if self.work is not None:
            self.work.wait()
        if self.ranks == 1:
            return self.buffer
        ranked = self.buffer.unflatten(0, (self.ranks, -1))  # (ranks, batch, seq / ranks, …)
        return ranked.transpose(0, 1).flatten(1, 2)


def _gather(x: Tensor, group: str, ranks: int, *, asynchronous: bool = False) -> _Moving:
    """Begin to gather, `asynchronous` beside what compute does until the result is waited for."""
    x = x.contiguous()
    buffer = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    return _Moving(buffer, ranks, ALL_GATHER(buffer, x, group=group_called(group), async_op=asynchronous))


def _scatter(x: Tensor, group: str, ranks: int, *, asynchronous: bool = False) -> _Moving:
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()  # (ranks, batch, seq / ranks, …)
    buffer = parts.new_empty(parts.shape[1:])
    work = REDUCE_SCATTER(buffer, parts.flatten(0, 1), group=group_called(group), async_op=asynchronous)
    return _Moving(buffer, 1, work)


def group_called(name: str) -> dist.ProcessGroup:
    """A group by its name: what operators are told, and compiled code keeps, are names."""
    return _resolve_process_group(GroupName(name))


def _longer(x: Tensor, width: int, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] * ranks, *x.shape[2:-1], width))


def _shorter(x: Tensor, width: int, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // ranks, *x.shape[2:-1], width))
