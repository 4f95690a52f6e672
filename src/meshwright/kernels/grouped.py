"""Grouped matmuls for MoE models: rows are sorted by expert, multiplied by group, and sorted back.

The rows of one expert are contiguous after the sort; `offsets` has the end of each group. The fast path does not read group sizes on the
host, so the host can run ahead of the device. Groups may have any size, also 0; no token is dropped or padded (MegaBlocks, Gale et al.
2023).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.kernels.router import has_kernel
from meshwright.spec.errors import BadInput

LEAST_WIDTH = 64
MOST_WIDTH = 16384
"""Minimum and maximum number of elements of a row that one program of `grouped_copies_triton` moves.

The minimum is a cache line of bf16. The maximum is what registers can hold.
"""


class ExpertOrder(NamedTuple):
    """The order of token copies sorted by expert. Copies for the same expert keep the order of their tokens.

    - `sorted` `(tokens · copies,)`: the number of the copy at each sorted position.
    - `positions` `(tokens, copies)`: the sorted position of each copy.
    - `offsets` `(experts,)`: the end of each expert's rows, int32.

    Example with 2 tokens and 2 copies each: token 0 chose experts 1 and 0, token 1 experts 1 and 2. `sorted` is [1, 0, 2, 3], `positions`
    [[1, 0], [2, 3]], `offsets` [1, 3, 4].
    """

    sorted: Tensor
    positions: Tensor
    offsets: Tensor


def order_by_expert(chosen: Tensor, load: Tensor) -> ExpertOrder:
    """Sort token copies by expert. `chosen` `(tokens, copies)` has their experts; `load` `(experts,)` has the number of copies per expert.

    The experts of a token must differ.
    """
    if has_kernel(chosen, load.shape[0]):
        from meshwright.kernels.router_triton import sort_by_expert

        return ExpertOrder(*sort_by_expert(chosen, load.shape[0]))
    offsets = load.cumsum(0).to(torch.int32)
    # With keys of 16 bits, because a radix sort makes a pass over the keys for each of their bytes.
    order = chosen.flatten().to(torch.int16).argsort(stable=True)
    indices = torch.arange(order.numel(), device=order.device)
    positions = torch.empty_like(order).scatter(0, order, indices)
    return ExpertOrder(order, positions.view_as(chosen), offsets)


def order_of(chosen: Tensor, experts: int) -> ExpertOrder:
    """As `order_by_expert`, if the copies per expert have not been counted."""
    if has_kernel(chosen, experts):
        from meshwright.kernels.router_triton import sort_by_expert

        return ExpertOrder(*sort_by_expert(chosen, experts))
    flat = chosen.flatten()
    return order_by_expert(chosen, flat.new_zeros(experts).scatter_add(0, flat, torch.ones_like(flat)))


def to_groups(tokens: Tensor, order: ExpertOrder) -> Tensor:
    """Return a row for each copy of tokens `(tokens, width)`, sorted by expert: `(tokens · copies, width)`."""
    return _ToGroups.apply(tokens, order.sorted, order.positions)


def from_groups(sorted_rows: Tensor, order: ExpertOrder) -> Tensor:
    """Return sorted rows `(tokens · copies, width)` in the order of tokens and copies: `(tokens, copies, width)`."""
    return _FromGroups.apply(sorted_rows, order.sorted, order.positions)


def sum_copies(sorted_rows: Tensor, order: ExpertOrder) -> Tensor:
    """Return the sum of each token's copies `(tokens, width)`, given sorted rows `(tokens · copies, width)`.

    Without gradients our kernel adds the copies. In compiled code torch's operators are one kernel too.
    """
    if not torch.compiler.is_compiling() and not (torch.is_grad_enabled() and sorted_rows.requires_grad):
        return _gather_sum(sorted_rows, order.positions)
    return _SumCopies.apply(sorted_rows, order.sorted, order.positions)


def sorted_weights(weights: Tensor, order: ExpertOrder) -> Tensor:
    """Return weights `(tokens, copies)` in sorted order, `(tokens · copies,)`."""
    return _ToGroups.apply(weights.reshape(-1, 1), order.sorted, order.positions.view(-1, 1)).squeeze(1)


def group_rows(vectors: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """Return for each row the vector of its group, `(rows, width)`, out of vectors `(groups, width)`; `offsets` as in `grouped_linear`.

    Rows after the last offset, which the buffer of received rows may have, get zeros.
    """
    return _GroupRows.apply(vectors, offsets, rows)


class _GroupRows(torch.autograd.Function):
    """`group_rows`. Backward adds the rows of each group by a matmul with a table that tells which rows each group has.

    torch's own backward of a lookup adds one row after another to few vectors: 4.9 ms per layer for 131,072 rows of gpt-oss-20b on an H200.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, offsets: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.groups = len(vectors)
        return F.embedding(_group_of_rows(offsets, rows), F.pad(vectors, (0, 0, 0, 1)))

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]  # torch's decorator hides the name of the first argument
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        (grad,) = grad_outputs
        members = torch.arange(ctx.groups, device=grad.device)[:, None] == _group_of_rows(offsets, len(grad))
        return members.to(grad.dtype) @ grad, None, None


def add_weighted_rows(rows: Tensor, vectors: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """Add to each of `rows` `(rows, width)` the vector of its group multiplied by its weight; otherwise as `group_rows`."""
    return _AddWeightedRows.apply(rows, vectors, offsets, weights)


class _AddWeightedRows(torch.autograd.Function):
    """`add_weighted_rows`. Only the vectors are saved for backward: one vector per row would take as much memory as the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, vectors: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, offsets, weights)
        looked_up = F.embedding(_group_of_rows(offsets, len(rows)), F.pad(vectors, (0, 0, 0, 1)))
        return rows + (looked_up * weights[:, None]).to(rows.dtype)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]  # torch's decorator hides the name of the first argument
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        vectors, offsets, weights = ctx.saved_tensors
        (grad,) = grad_outputs
        group = _group_of_rows(offsets, len(grad))
        members = torch.arange(len(vectors), device=grad.device)[:, None] == group
        vector_grads = (members * weights).to(grad.dtype) @ grad
        sums = grad @ F.pad(vectors, (0, 0, 0, 1)).t()  # (rows, groups + 1)
        weight_grads = sums.gather(1, group[:, None]).squeeze(1)
        return grad, vector_grads, None, weight_grads.to(weights.dtype)


def _group_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """Return the group of each row, `(rows,)`. Rows after the last offset get the number of groups."""
    return torch.searchsorted(offsets, torch.arange(rows, dtype=offsets.dtype, device=offsets.device), right=True)


def sizes_stay_on_device(x: Tensor) -> bool:
    """Whether grouped matmuls of `x` do not need the sizes of groups on the host."""
    return x.is_cuda and x.dtype == torch.bfloat16


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, *, reference: bool = False) -> Tensor:
    """Multiply each row of x `(rows, in)` by the transposed matrix of its group. weight is `(groups, out, in)`, the result `(rows, out)`.

    Group g has the rows from `offsets[g - 1]` to `offsets[g]`; the last offset is the number of rows. For bf16 on CUDA it is one grouped
    matmul. Otherwise, and with `reference`, it is a loop over groups; the host reads the groups' sizes. Raises BadInput if the fast path
    gets widths that are not multiples of 8.
    """
    reference = reference or not sizes_stay_on_device(x)
    if not reference and (weight.shape[1] % 8 or weight.shape[2] % 8):
        raise BadInput(
            f"a grouped matmul in bf16 needs widths that are multiples of 8, got experts of {weight.shape[2]} to {weight.shape[1]}: "
            "change model.hidden and model.expert_hidden, or plan.compute: fp32"
        )
    return _grouped_linear(x, weight, offsets, reference)


# A custom operator, because torch.compile cannot trace sizes that the host reads, and because torch's own backward requires gradients of
# a certain memory layout.
@torch.library.custom_op("meshwright::grouped_linear", mutates_args=())
def _grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, reference: bool) -> Tensor:
    if reference or not x.shape[0]:  # no rows: no token has chosen an expert of this rank
        return grouped_linear_loop(x, weight, offsets)
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)


@torch.library.custom_op("meshwright::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, reference: bool
) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    return (grouped_gradients_loop if reference or not x.shape[0] else grouped_gradients)(grad, x, weight, offsets)


def grouped_gradients(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, given the gradient of the output `(rows, out)`, contiguous; two grouped matmuls."""
    return F.grouped_mm(grad, weight, offs=offsets), _fast_weight_gradient(grad, x, offsets)


def grouped_weight_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, *, reference: bool = False
) -> Tensor:
    """Return the gradient of weight `(groups, out, in)`, in the dtype of x.

    `grad` is the gradient of the output `(rows, out)`, contiguous; x is `(rows, in)`. It is fast under the conditions of `grouped_linear`.
    """
    if reference or not x.is_cuda or x.dtype != torch.bfloat16 or not x.shape[0]:
        return _weight_gradient_loop(grad, x, weight, offsets)
    return _fast_weight_gradient(grad, x, offsets)


def _fast_weight_gradient(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    weight_grad = F.grouped_mm(grad.t(), x, offs=offsets)
    if grad.is_cuda and _skips_empty_groups(grad.device):
        empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
        weight_grad.masked_fill_(empty[:, None, None], 0)
    return weight_grad


@cache
def _skips_empty_groups(device: torch.device) -> bool:
    """Whether the grouped matmul leaves weight gradients of empty groups unwritten, as on Blackwell (pytorch issue
    172439)."""
    return torch.cuda.get_device_capability(device)[0] >= 10


def grouped_linear_loop(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The grouped matmul as a loop over groups, for any device and dtype."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    for group, rows in enumerate(groups_of(offsets)):
        torch.mm(x[rows], weight[group].t(), out=out[rows])
    return out


def grouped_gradients_loop(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """`grouped_gradients` as a loop over groups."""
    x_grad = torch.empty_like(x)
    for group, rows in enumerate(groups_of(offsets)):
        torch.mm(grad[rows], weight[group], out=x_grad[rows])
    return x_grad, _weight_gradient_loop(grad, x, weight, offsets)


def _weight_gradient_loop(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    weight_grad = torch.empty_like(weight)
    for group, rows in enumerate(groups_of(offsets)):
        torch.mm(grad[rows].t(), x[rows], out=weight_grad[group])
    return weight_grad


def groups_of(offsets: Tensor) -> list[slice]:
    """Return the range of rows of each group. The host waits for the device."""
    ends = offsets.tolist()
    return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


@_grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor, reference: bool) -> Tensor:
    del offsets, reference
    return x.new_empty(x.shape[0], weight.shape[1])


@_grouped_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, reference: bool) -> tuple[Tensor, Tensor]:
    del grad, offsets, reference
    return torch.empty_like(x), torch.empty_like(weight)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    del output
    x, weight, offsets, ctx.reference = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, offsets)


def _autograd_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    if x is None:  # a frozen weight
        return _grouped_linear(grad.contiguous(), weight.transpose(1, 2), offsets, ctx.reference), None, None, None
    return *_grouped_linear_backward(grad, x, weight, offsets, ctx.reference), None, None


_grouped_linear.register_autograd(_autograd_backward, setup_context=_setup_context)
GROUPED_OPERATOR = torch.ops.meshwright.grouped_linear.default
"""The operator by which a recompute policy recognises the grouped matmul."""


class _ToGroups(torch.autograd.Function):
    """Row permutation whose forward and backward both gather rows by index.

    Autograd's own backward would sum with atomics: in bf16 and in a random order.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return _spread(tokens, order, positions)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]  # torch's decorator hides the name of the first argument
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        (grad,) = grad_outputs
        return _gather_sum(grad, positions), None, None


def _gather_sum(sorted_rows: Tensor, positions: Tensor) -> Tensor:
    """The sums `(tokens, width)` of rows at `positions` `(tokens, copies)`."""
    if not _has_kernel(sorted_rows):
        return sorted_rows[positions].sum(1)
    from meshwright.kernels.grouped_copies_triton import gather_sum

    return gather_sum(sorted_rows, positions)


def _spread(tokens: Tensor, order: Tensor, positions: Tensor) -> Tensor:
    """Each token `(tokens, width)` at its sorted positions, `(tokens · copies, width)`."""
    if not _has_kernel(tokens):
        return tokens[order // positions.shape[1]]
    from meshwright.kernels.grouped_copies_triton import spread_tokens

    return spread_tokens(tokens, positions)


def _has_kernel(x: Tensor) -> bool:
    """Whether rows `(rows, width)` are moved by the kernels of `grouped_copies_triton`; the router's weights are too narrow."""
    return x.is_cuda and x.element_size() <= 4 and LEAST_WIDTH <= x.shape[1] <= MOST_WIDTH


class _SumCopies(torch.autograd.Function):
    """The transpose of `_ToGroups`."""

    @staticmethod
    def forward(ctx: Any, sorted_rows: Tensor, order: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(order, positions)
        return sorted_rows[positions].sum(1)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]  # torch's decorator hides the name of the first argument
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _spread(grad_outputs[0], *ctx.saved_tensors), None, None


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
