"""Grouped matrix products for mixtures of experts: sorting of rows, products by group, and the inverse sorting.

Rows are sorted so that each expert's lie together; `offsets` say where each group ends. Group sizes are never read by
the host on the fast path, so that it runs ahead of the device. Groups may be empty and as uneven as they like: nothing
is dropped or padded (MegaBlocks, Gale et al. 2023).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.spec.errors import BadInput


class Order(NamedTuple):
    """Where the copies of tokens lie when they are sorted by expert, tokens in order within one.

    `sorted` `(tokens · copies,)`: the copy at each sorted place; `positions` `(tokens, copies)`: the sorted place of each copy;
    `offsets` `(experts,)`: where each expert's rows end, int32.
    """

    sorted: Tensor
    positions: Tensor
    offsets: Tensor


def order_by_expert(chosen: Tensor, load: Tensor) -> Order:
    """The order of copies whose experts are `chosen` `(tokens, copies)`; `load` `(experts,)` counts them."""
    order = chosen.flatten().argsort(stable=True)
    counted = torch.arange(order.numel(), device=order.device)
    positions = torch.empty_like(order).scatter(0, order, counted)
    return Order(order, positions.view_as(chosen), load.cumsum(0).to(torch.int32))


def to_groups(tokens: Tensor, order: Order) -> Tensor:
    """Rows `(tokens · copies, width)` of tokens `(tokens, width)`, sorted by expert."""
    return _ToGroups.apply(tokens, order.sorted, order.positions)


def from_groups(sorted_rows: Tensor, order: Order) -> Tensor:
    """The copies `(tokens, copies, width)` of sorted rows `(tokens · copies, width)`."""
    return _FromGroups.apply(sorted_rows, order.sorted, order.positions)


def summed(sorted_rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """Each token's copies times their weights `(tokens, copies)`, added up: `(tokens, width)`, in the wider format of both."""
    return (from_groups(sorted_rows, order) * weights[..., None]).sum(1)


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, *, plain: bool = False) -> Tensor:
    """Each row of x `(rows, in)` times its group's matrix, transposed: `(rows, out)`, with weight `(groups, out, in)`.

    Group g has the rows from `offsets[g - 1]` to `offsets[g]`; the last offset is the number of rows. On CUDA in bf16 one grouped matrix
    product; elsewhere, and with `plain`, a loop over the groups, for which the host reads their sizes. BadInput when the fast path
    meets widths that are not multiples of 8.
    """
    plain = plain or not x.is_cuda or x.dtype != torch.bfloat16
    if not plain and (weight.shape[1] % 8 or weight.shape[2] % 8):
        raise BadInput(
            f"a grouped product in bf16 needs widths that are multiples of 8, got experts of {weight.shape[2]} to {weight.shape[1]}: "
            "change model.hidden and model.expert_hidden, or plan.compute: fp32"
        )
    return _grouped_linear(x, weight, offsets, plain)


# An operator of its own: a compiler could not see through sizes that the host reads, and torch's own backward takes gradients only as
# they happen to lie in memory.
@torch.library.custom_op("meshwright::grouped_linear", mutates_args=())
def _grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, plain: bool) -> Tensor:
    if plain or not x.shape[0]:  # no rows: a rank whose experts nobody chose
        return looped(x, weight, offsets)
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)


@torch.library.custom_op("meshwright::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, plain: bool
) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    return (looped_gradients if plain or not x.shape[0] else grouped_gradients)(grad, x, weight, offsets)


def grouped_gradients(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight from that of the output `(rows, out)`, contiguous, by two grouped products."""
    x_grad = F.grouped_mm(grad, weight, offs=offsets)
    weight_grad = F.grouped_mm(grad.t(), x, offs=offsets)
    if grad.is_cuda and _leaves_empty_groups(grad.device):
        empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
        weight_grad.masked_fill_(empty[:, None, None], 0)
    return x_grad, weight_grad


@cache
def _leaves_empty_groups(device: torch.device) -> bool:
    """Whether the product does not write an empty group's weight gradient: true on Blackwell (pytorch issue 172439)."""
    return torch.cuda.get_device_capability(device)[0] >= 10


def looped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The plain twin of the product, for any device and format."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    for group, rows in enumerate(_groups(offsets)):
        torch.mm(x[rows], weight[group].t(), out=out[rows])
    return out


def looped_gradients(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The plain twin of `grouped_gradients`."""
    x_grad, weight_grad = torch.empty_like(x), torch.empty_like(weight)
    for group, rows in enumerate(_groups(offsets)):
        torch.mm(grad[rows], weight[group], out=x_grad[rows])
        torch.mm(grad[rows].t(), x[rows], out=weight_grad[group])
    return x_grad, weight_grad


def _groups(offsets: Tensor) -> list[slice]:
    ends = offsets.tolist()
    return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


@_grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor, plain: bool) -> Tensor:
    del offsets, plain
    return x.new_empty(x.shape[0], weight.shape[1])


@_grouped_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, plain: bool) -> tuple[Tensor, Tensor]:
    del grad, offsets, plain
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    del output
    *tensors, ctx.plain = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_grouped_linear_backward(grad, *ctx.saved_tensors, ctx.plain), None, None


_grouped_linear.register_autograd(_differentiate, setup_context=_keep)
GROUPED_OPERATOR = torch.ops.meshwright.grouped_linear.default
"""What a recompute policy sees of the product."""


class _ToGroups(torch.autograd.Function):
    """Row permutation whose forward and backward both gather rows by index.

    Autograd's own backward would sum by atomics, in bf16 and in no fixed order.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return tokens[order // positions.shape[1]]

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]  # torch's decorator hides the name of the first argument
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        return grad_outputs[0][positions].sum(1), None, None


class _FromGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sorted_rows: Tensor, order: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return sorted_rows[positions]

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]  # torch's decorator hides the name of the first argument
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grad_outputs[0].flatten(0, 1)[order], None, None
