"""The linear layer, whose backward can be split: gradients of the inputs at once, those of the weights when they are asked for.

Zero-bubble pipelines (Qi et al. 2024) fill waiting time with weight gradients. And where micro-batches are summed, the product that makes
a weight gradient can add it to the sum, unrounded and without a pass of its own (gradient accumulation fusion in Megatron-LM). What it
needs, the layer's input X and its output's gradient dY, leaves the layer as the gradients of two extra inputs, the taps. A compiled
backward therefore has no side effect: X and dY are among its outputs, which the compiler may neither overwrite nor reuse. (An operator
that took them from inside the graph would hand out memory that Inductor holds for dead and writes the next result to.)
With products in fp8 what leaves are dYᵀ and Xᵀ as they are multiplied, rounded, with their scales: half the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels import fp8_products as fp8


class Linear(nn.Linear):
    """x · weightᵀ + bias: nn.Linear, which is also its plain twin, until `split_backward` of the block around it."""

    scaling: fp8.Scaling | None = None
    """Multiplies in fp8 with scales of this kind; None in the weight's own format."""
    low_weight: fp8.Low | None = None
    """The weight in fp8, where it is gathered so (`parallel.fp8_weights`): `weight` then only takes the gradient."""
    taps: tuple[Tensor, ...] | None = None
    """Tensors that are never read, of the shape of what the weight's gradient is made of, which is their gradients: dY and X."""
    spread: int = 1
    """How many times as many tokens it sees as the block around it is given (parallel.products)."""

    # pyrefly: ignore [bad-override-param-name]  # every block here calls its input x
    def forward(self, x: Tensor) -> Tensor:
        """`(…, out_features)` of x `(…, in_features)`."""
        # The choice is made while tracing, so that a block that is not split compiles to what nn.Linear gives.
        taps = self.taps if torch.is_grad_enabled() else None
        if self.scaling is not None:
            out = fp8.linear(x, self.weight, self.low_weight, self.scaling, taps)
            return out if self.bias is None else out + self.bias
        if taps is None:
            return F.linear(x, self.weight, self.bias)
        output_tap, input_tap = taps
        assert x.shape == input_tap.shape, "every Linear of a split block takes the block's own rows"
        return _Product.apply(x, self.weight, self.bias, output_tap, input_tap)


def split_backward(block: nn.Module) -> None:
    """Let the weight gradients of every Linear in the block be deferred, by wrapping its `forward` as it is now: last, after compilation.

    `forward` takes x `(…, features)` first, every Linear inside sees the same leading dimensions, the last of them `spread` times, and runs
    once. What becomes of the gradients is decided when a backward runs: see `deferring` and `adding`. They no longer pass through
    autograd's accumulation, so hooks on a weight's gradient do not fire.
    """
    forward = block.forward
    linears = [module for module in block.modules() if isinstance(module, Linear)]

    def tapped(x: Tensor, *inputs: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            # Left in place afterwards: eager recompute runs the block once more during backward, with any taps of that shape.
            for linear in linears:
                *batch, tokens = x.shape[:-1]
                linear.taps = _new_taps(linear, torch.Size((*batch, tokens * linear.spread)))
        return forward(x, *inputs, **options)

    block.forward = tapped


AddProduct = Callable[[Tensor, Tensor, Tensor], None]


def add_to_gradient(weight: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a weight's `.grad`, in the weight's format."""
    if weight.grad is None:
        weight.grad = a @ b
    else:
        weight.grad.addmm_(a, b)


class WeightQueue:
    """The weight gradients one backward has left to compute; an executor keeps one per stage and micro-batch in flight."""

    def __init__(self) -> None:
        self._parked: deque[_Parked] = deque()

    @property
    def pending(self) -> int:
        """How many gradients wait. (Not `__len__`, which would make an empty queue look like none.)"""
        return len(self._parked)

    def park(self, weight: Tensor, *parts: Tensor) -> None:
        """Keep the output's gradient `(…, out)` and x `(…, in)` of one product with weight `(out, in)`; in fp8 both are turned,
        each with its scale."""
        self._parked.append(_parked(weight, parts))

    def drain(
        self, parameters: Iterable[Tensor] | None = None, *, partial: bool = False, add: AddProduct = add_to_gradient
    ) -> None:
        """Add what is parked, dYᵀ · X, to the gradients of its weights, oldest first, and let go of it. `add` takes a weight and the two
        factors; what was parked in fp8 is added to `.grad` in any case.

        `parameters`: the weights it may belong to, any when None; under FSDP2 the unit's unsharded parameters, which need not be gathered,
        as their values are not read. An entry of another weight raises RuntimeError before anything is computed, or with `partial` is
        left for a later call. RuntimeError too if an in-place operator wrote to a parked tensor in the meantime; a collective that
        receives into it is not noticed.
        """
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        strangers = [entry for entry in self._parked if wanted is not None and id(entry.weight) not in wanted]
        if strangers and not partial:
            shapes = ", ".join(str(tuple(entry.weight.shape)) for entry in strangers)
            raise RuntimeError(
                f"deferred gradients of weights that are not among the {len(wanted or ())} given: {shapes}"
            )
        for _ in range(len(self._parked)):
            entry = self._parked.popleft()
            if wanted is None or id(entry.weight) in wanted:
                entry.add(add)
            else:
                self._parked.append(entry)


@contextmanager
def deferring(queue: WeightQueue) -> Iterator[None]:
    """Every backward inside parks the weight gradients of split blocks in `queue`, which must be empty; outside they are computed at once.

    RuntimeError if the queue holds gradients that were never drained, or if another one is active.
    """
    if queue.pending:
        raise RuntimeError(
            f"the queue still holds {queue.pending} weight gradients of an earlier backward: drain it first"
        )
    with _taken_by(queue.park):
        yield


@contextmanager
def adding(add: AddProduct) -> Iterator[None]:
    """Every backward inside computes the weight gradients of split blocks at once by `add`, which takes a weight and the two factors.

    RuntimeError if weight gradients are being deferred.
    """
    with _taken_by(lambda weight, *parts: _parked(weight, parts).add(add)):
        yield


@contextmanager
def _taken_by(taker: Callable[..., None]) -> Iterator[None]:
    global _taker
    if _taker is not None:
        raise RuntimeError("weight gradients are already being deferred: one queue at a time is active")
    _taker = taker
    try:
        yield
    finally:
        _taker = None


# One for the process, because autograd runs the backward of CUDA tensors on a thread of its own: a thread-local or context variable set
# around `backward()` is not seen there.
_taker: Callable[..., None] | None = None


class _Parked(NamedTuple):
    # Under FSDP2 the weight is the unsharded parameter: one object, however often its storage is freed and filled again.
    weight: Tensor
    parts: tuple[Tensor, ...]
    versions: tuple[int, ...]

    @torch.no_grad()
    def add(self, add: AddProduct) -> None:
        if tuple(part._version for part in self.parts) != self.versions:
            raise RuntimeError(
                f"what was parked for a weight of shape {tuple(self.weight.shape)} was overwritten before it was used"
            )
        if len(self.parts) > 2:
            grad, grad_scale, x, x_scale = self.parts
            made = fp8.weight_gradient(fp8.Low(grad, grad_scale), fp8.Low(x, x_scale), self.weight.dtype)
            self.weight.grad = made if self.weight.grad is None else self.weight.grad.add_(made)
            return
        grad, x = (part.flatten(0, -2) for part in self.parts)
        add(self.weight, grad.t(), x)


def _parked(weight: Tensor, parts: tuple[Tensor, ...]) -> _Parked:
    # Detached, as an eager x would keep its whole graph.
    return _Parked(weight, tuple(part.detach() for part in parts), tuple(part._version for part in parts))


class _Product(torch.autograd.Function):
    """F.linear that hands X and dY to the taps in place of the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, output_tap: Tensor, input_tap: Tensor
    ) -> Tensor:
        del output_tap, input_tap
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        input_grad = grad @ weight if ctx.needs_input_grad[0] else None
        bias_grad = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return input_grad, None, bias_grad, grad, x


class _Taps(torch.autograd.Function):
    """Makes the taps of a weight; their gradients go to whom `deferring` or `adding` named, or straight into the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shapes: _Shapes) -> tuple[Tensor, ...]:
        ctx.weight = weight
        return tuple(weight.new_empty((), dtype=dtype).expand(shape) for shape, dtype in shapes)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, *parts: Tensor) -> tuple[None, None]:
        if _taker is None:
            _parked(ctx.weight, parts).add(add_to_gradient)
        else:
            _taker(ctx.weight, *parts)
        return None, None


_Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def _new_taps(linear: Linear, rows: torch.Size) -> tuple[Tensor, ...] | None:
    weight = linear.weight
    if not weight.requires_grad:
        return None
    # Made anew in every forward: autograd runs the latest nodes first, so that without a queue the gradient is there before an older
    # node at the block's input (such as FSDP2's hook) collects it.
    return _Taps.apply(weight, _tap_shapes(linear, rows))


def _tap_shapes(linear: Linear, rows: torch.Size) -> _Shapes:
    weight = linear.weight
    if linear.scaling is not None:
        return fp8.tap_shapes(weight, rows.numel(), linear.scaling)
    width, columns = weight.shape
    return ((*rows, width), weight.dtype), ((*rows, columns), weight.dtype)
