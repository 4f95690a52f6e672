"""Matrix products whose tokens are gathered before, or summed and scattered behind: what tensor parallelism makes of a linear layer.

Between products a tensor rank has its part of every sequence; inside, all tokens and its part of the features (Shoeybi et al. 2019,
Korthikanti et al. 2022). Each product is one operator together with its collectives, so that a compiled block stays one graph and the
compiler neither moves nor keeps what was gathered. Backward gathers the tokens anew: a block then leaves a rank its own part of the
sequence only. In backward a collective runs beside the product that does not wait for it. Where the ranks' group has peers
(`parallel.peers`), an operator has its asynchronous twin do the work (`parallel.async_tensor`).

Shapes: x `(batch, seq / ranks, in)` becomes `(batch, seq, out)` behind a gathered product; behind a scattered one `(batch, seq, in)`
becomes `(batch, seq / ranks, out)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from meshwright.kernels.linear import Linear
from meshwright.parallel import async_tensor
from meshwright.parallel.peers import Peers, peers_of

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Under their names of torch 2.13, which warns of those of 2.11."""


class GroupedLinear(Linear):
    """A part of a linear layer, whose weight and bias it takes over; the other parts are with the tensor ranks of `group`, by its name.

    `peers` are kept open for the group's operators.
    """

    def __init__(self, linear: nn.Linear, group: str, ranks: int, peers: Peers | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = linear.weight.shape
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(linear, name))
        self.group, self.spread, self.peers = group, ranks, peers


class GatheredLinear(GroupedLinear):
    """Some output features of a linear layer, for all tokens of the sequence it is given a part of."""

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, seq, out)` of x `(batch, seq / ranks, in)`."""
        if not torch.is_grad_enabled():
            return gathered_product(x, self.weight, self.bias, self.group, self.spread)
        output_tap, input_tap = self.taps or (None, None)
        return _Gathered.apply(x, self.weight, self.bias, input_tap, output_tap, self.group, self.spread)


class ScatteredLinear(GroupedLinear):
    """Some input features of a linear layer: sums its ranks' products and keeps a part of the sequence. Its bias is whole."""

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, seq / ranks, out)` of x `(batch, seq, in)`."""
        if not torch.is_grad_enabled():
            y = scattered_product(x, self.weight, self.group, self.spread)
        else:
            output_tap, input_tap = self.taps or (None, None)
            y = _Scattered.apply(x, self.weight, input_tap, output_tap, self.group, self.spread)
        return y if self.bias is None else y + self.bias


class _Gathered(torch.autograd.Function):
    """With taps (`kernels.linear`) their gradients are the gathered tokens and dY, in place of the weight's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, input_tap: Tensor | None, output_tap: Tensor | None,
        group: str, ranks: int,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.tapped, ctx.biased, ctx.group, ctx.ranks = input_tap is not None, bias is not None, group, ranks
        return gathered_product(x, weight, bias, group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        bias_grad = grad.flatten(0, -2).sum(0) if ctx.biased else None
        if ctx.tapped:
            x_grad, gathered = gathered_input_gradient(x, weight, grad, ctx.group, ctx.ranks)
            return x_grad, None, bias_grad, gathered, grad, None, None
        x_grad, weight_grad = gathered_gradients(x, weight, grad, ctx.group, ctx.ranks)
        return x_grad, weight_grad, bias_grad, None, None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, input_tap: Tensor | None, output_tap: Tensor | None, group: str, ranks: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tapped, ctx.group, ctx.ranks = input_tap is not None, group, ranks
        return scattered_product(x, weight, group, ranks)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_grad, whole = scattered_input_gradient(grad, weight, ctx.group, ctx.ranks)
        if ctx.tapped:
            return x_grad, None, x, whole, None, None
        return x_grad, whole.flatten(0, -2).t() @ x.flatten(0, -2), None, None, None, None


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


@torch.library.custom_op("meshwright::gathered_product", mutates_args=())
def gathered_product(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, ranks: int) -> Tensor:
    """gathered(x) · weightᵀ + bias."""
    if peers := peers_of(group):
        return async_tensor.gathered_product(peers, x, weight, bias)
    return F.linear(_gather(x, group, ranks).wait(), weight, bias)


@gathered_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, ranks: int) -> Tensor:
    return _longer(x, weight.shape[0], ranks)


@torch.library.custom_op("meshwright::gathered_gradients", mutates_args=())
def gathered_gradients(x: Tensor, weight: Tensor, grad: Tensor, group: str, ranks: int) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight, of a gathered product's output gradient."""
    if peers := peers_of(group):
        return async_tensor.gathered_gradients(peers, x, weight, grad)
    tokens = _gather(x, group, ranks, aside=True)
    x_grad = _scatter(grad @ weight, group, ranks, aside=True)  # the product beside the gather
    weight_grad = grad.flatten(0, -2).t() @ tokens.wait().flatten(0, -2)  # and this one beside the scatter
    return x_grad.wait(), weight_grad


@gathered_gradients.register_fake
def _(x: Tensor, weight: Tensor, grad: Tensor, group: str, ranks: int) -> tuple[Tensor, Tensor]:
    return _shorter(grad, x.shape[-1], ranks), torch.empty_like(weight, memory_format=torch.contiguous_format)


@torch.library.custom_op("meshwright::gathered_input_gradient", mutates_args=())
def gathered_input_gradient(x: Tensor, weight: Tensor, grad: Tensor, group: str, ranks: int) -> tuple[Tensor, Tensor]:
    """The gradient of x, and the gathered tokens that the weight's will need."""
    if peers := peers_of(group):
        return async_tensor.gathered_input_gradient(peers, x, weight, grad)
    tokens = _gather(x, group, ranks, aside=True)
    x_grad = _scatter(grad @ weight, group, ranks)
    return x_grad.wait(), tokens.wait()


@gathered_input_gradient.register_fake
def _(x: Tensor, weight: Tensor, grad: Tensor, group: str, ranks: int) -> tuple[Tensor, Tensor]:
    return _shorter(grad, x.shape[-1], ranks), _longer(x, x.shape[-1], ranks)


@torch.library.custom_op("meshwright::scattered_product", mutates_args=())
def scattered_product(x: Tensor, weight: Tensor, group: str, ranks: int) -> Tensor:
    """This rank's tokens of the ranks' sum of x · weightᵀ."""
    if peers := peers_of(group):
        return async_tensor.scattered_product(peers, x, weight)
    return _scatter(F.linear(x, weight), group, ranks).wait()


@scattered_product.register_fake
def _(x: Tensor, weight: Tensor, group: str, ranks: int) -> Tensor:
    return _shorter(x, weight.shape[0], ranks)


@torch.library.custom_op("meshwright::scattered_input_gradient", mutates_args=())
def scattered_input_gradient(grad: Tensor, weight: Tensor, group: str, ranks: int) -> tuple[Tensor, Tensor]:
    """The gradient of a scattered product's input, and the gathered output gradient that the weight's will need."""
    if peers := peers_of(group):
        return async_tensor.scattered_input_gradient(peers, grad, weight)
    whole = _gather(grad, group, ranks).wait()
    return whole @ weight, whole


@scattered_input_gradient.register_fake
def _(grad: Tensor, weight: Tensor, group: str, ranks: int) -> tuple[Tensor, Tensor]:
    return _longer(grad, weight.shape[1], ranks), _longer(grad, grad.shape[-1], ranks)


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


def _gather(x: Tensor, group: str, ranks: int, *, aside: bool = False) -> _Moving:
    """Begin to gather, `aside` beside what compute does until the result is waited for."""
    x = x.contiguous()
    buffer = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    return _Moving(buffer, ranks, ALL_GATHER(buffer, x, group=group_called(group), async_op=aside))


def _scatter(x: Tensor, group: str, ranks: int, *, aside: bool = False) -> _Moving:
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()  # (ranks, batch, seq / ranks, …)
    buffer = parts.new_empty(parts.shape[1:])
    work = REDUCE_SCATTER(buffer, parts.flatten(0, 1), group=group_called(group), async_op=aside)
    return _Moving(buffer, 1, work)


def group_called(name: str) -> dist.ProcessGroup:
    """A group by its name: what operators are told, and compiled code keeps, are names."""
    return _resolve_process_group(GroupName(name))


def _longer(x: Tensor, width: int, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] * ranks, *x.shape[2:-1], width))


def _shorter(x: Tensor, width: int, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // ranks, *x.shape[2:-1], width))
