"""A linear layer with a split backward: gradients of inputs are computed at once, gradients of weights may be computed later.

A split backward has two uses. Zero-bubble pipelines (Qi et al. 2024) fill idle time with weight gradients. And if the gradients of several
micro-batches are summed, the matmul of a weight gradient can add to the sum directly, without rounding and without a separate pass
(gradient accumulation fusion in Megatron-LM). Both need the factors of that matmul: the layer's input X and the gradient dY of its output.

The layer returns the factors as the gradients of two extra inputs, the taps. So a compiled backward has no side effect: X and dY are among
its outputs, which the compiler may neither overwrite nor reuse. (An operator that stored X and dY from inside the graph would keep memory
that Inductor regards as free and overwrites.) The layer's `gradient_sink` receives the factors. With fp8 matmuls the factors are dYᵀ and Xᵀ
in fp8 with their scales, which are half as many bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.kernels import fp8_matmuls as fp8
from meshwright.kernels.adapter import Adapter
from meshwright.kernels.fixed_matmul import few_linear, fixed_linear, is_few


class Linear(nn.Linear):
    """x · weightᵀ + bias. It is computed as in nn.Linear, unless the layer has taps, an adapter, fp8 scaling or a fixed order."""

    scaling: fp8.Scaling | None = None
    """How operands are scaled for fp8 matmuls; None: the layer multiplies in the dtype of the weight."""
    fp8_weight: fp8.Fp8Matrix | None = None
    """The weight in fp8, if it is gathered in fp8 (`parallel.fp8_weights`); `weight` then only receives the gradient."""
    gradient_sink: WeightGradientSink | None = None
    """Receives the factors of the weight gradient if the layer has taps. None: the gradient is added to `weight.grad`."""
    taps: tuple[Tensor, ...] | None = None
    """Extra inputs whose gradients are the factors of the weight gradient, dY and X. They are expanded scalars and need no memory."""
    fixed_order: bool = False
    """Whether matmuls without gradients on CUDA give bits that do not depend on the other tokens (`kernels.fixed_matmul`)."""
    tokens_per_input_token: int = 1
    """How many tokens this layer's input has per token of the block's input; above 1 with sequence parallelism
    (`parallel.linear_exchanges`)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.adapter: Adapter | None = None

    # pyrefly: ignore [bad-override-param-name]  # every block here calls its input x
    def forward(self, x: Tensor) -> Tensor:
        """Return the output `(…, out_features)` for x `(…, in_features)`."""
        if self.adapter is None:
            return self._matmul(x)
        y = self.adapter(x, self._matmul(x, biased=False), self.weight)
        return y if self.bias is None else y + self.bias

    def _matmul(self, x: Tensor, *, biased: bool = True) -> Tensor:
        """Return x · weightᵀ, plus the bias if there is one and `biased`."""
        # Tested while tracing, so that a block without a split backward compiles to the graph of nn.Linear.
        taps = self.taps if torch.is_grad_enabled() else None
        if self.scaling is not None:
            out = fp8.linear(x, self.weight, self.fp8_weight, self.scaling, taps)
            return out if self.bias is None or not biased else out + self.bias
        if self.fixed_order and not torch.is_grad_enabled():
            return fixed_linear(x, self.weight, self.bias if biased else None)
        if is_few(x, self.weight):
            return few_linear(x, self.weight, self.bias if biased else None)
        if taps is None:
            return F.linear(x, self.weight, self.bias if biased else None)
        output_tap, input_tap = taps
        assert x.shape == input_tap.shape, "every Linear of a split block receives the block's own tokens"
        return _Matmul.apply(x, self.weight, self.bias if biased else None, output_tap, input_tap)


def with_taps(forward: Callable[..., Any], modules: Iterable[nn.Module]) -> Callable[..., Any]:
    """Return `forward` with a split backward: the weight gradients of every Linear in `modules` go to its `gradient_sink`.

    `forward` may be compiled. Its first tensor must be x `(…, tokens, features)`. Every Linear must run once, on an input with the leading
    dimensions of x, where the number of tokens is multiplied by `tokens_per_input_token`. Weight gradients do not pass through autograd's
    accumulation any more, so hooks on them do not run.
    """
    linears = [module for root in modules for module in root.modules() if isinstance(module, Linear)]

    def tapped(*inputs: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            x = next(value for value in inputs if isinstance(value, Tensor))
            # The taps stay set after forward: eager recompute runs the block again during backward, with any taps of that shape.
            for linear in linears:
                *batch, tokens = x.shape[:-1]
                linear.taps = _new_taps(linear, torch.Size((*batch, tokens * linear.tokens_per_input_token)))
        return forward(*inputs, **options)

    return tapped


AddMatmul = Callable[[Tensor, Tensor, Tensor], None]
"""A function add(weight, a, b) that adds a @ b to the gradient of the weight."""


def add_to_gradient(weight: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `weight.grad`, in the weight's dtype."""
    if weight.grad is None:
        weight.grad = a @ b
    else:
        weight.grad.addmm_(a, b)


class GradientFactors(NamedTuple):
    """The two factors of one weight gradient, from one backward of one layer."""

    # Under FSDP2 the weight is the unsharded parameter. It is one object, however often its memory is freed and filled again.
    weight: Tensor
    tensors: tuple[Tensor, ...]
    """dY `(…, out)` and X `(…, in)`; with fp8: dYᵀ, its scale, Xᵀ, its scale."""
    versions: tuple[int, ...]
    """Version counters of the tensors, by which it is detected if an in-place operator overwrites one."""

    @torch.no_grad()
    def add_matmul(self, add: AddMatmul) -> None:
        """Compute dYᵀ · X and add it to the weight's gradient by `add`. With fp8 factors it is added to `weight.grad` instead.

        Raises RuntimeError if an in-place operator has written to a factor meanwhile. A collective that writes to a factor is not detected.
        """
        if tuple(tensor._version for tensor in self.tensors) != self.versions:
            raise RuntimeError(
                f"a factor of the gradient of a weight of shape {tuple(self.weight.shape)} was overwritten before it was used"
            )
        if len(self.tensors) > 2:
            grad, grad_scale, x, x_scale = self.tensors
            matmul = fp8.weight_gradient(fp8.Fp8Matrix(grad, grad_scale), fp8.Fp8Matrix(x, x_scale), self.weight.dtype)
            self.weight.grad = matmul if self.weight.grad is None else self.weight.grad.add_(matmul)
            return
        grad, x = (tensor.flatten(0, -2) for tensor in self.tensors)
        add(self.weight, grad.t(), x)


class WeightQueue:
    """The deferred weight gradients of one backward, as factors. The executor has one queue per unit and micro-batch in flight."""

    def __init__(self) -> None:
        self._deferred: deque[GradientFactors] = deque()

    @property
    def pending(self) -> int:
        """Number of deferred gradients. (It is not `__len__`, because an empty queue would then be false.)"""
        return len(self._deferred)

    def append(self, factors: GradientFactors) -> None:
        self._deferred.append(factors)

    def drain(
        self, parameters: Iterable[Tensor] | None = None, *, partial: bool = False, add: AddMatmul = add_to_gradient
    ) -> None:
        """Compute the deferred gradients, oldest first, add each by `add`, and free the factors.

        `parameters` are the weights whose gradients are computed; None: all. Under FSDP2 these are the unit's unsharded parameters. They
        need not be gathered, because their values are not read. If the queue has a gradient of another weight, RuntimeError is raised
        before anything is computed; with `partial` this gradient stays in the queue instead. Also raises RuntimeError as
        `GradientFactors.add_matmul` does.
        """
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        others = [factors for factors in self._deferred if wanted is not None and id(factors.weight) not in wanted]
        if others and not partial:
            shapes = ", ".join(str(tuple(factors.weight.shape)) for factors in others)
            raise RuntimeError(
                f"deferred gradients of weights that are not among the {len(wanted or ())} given: {shapes}"
            )
        for _ in range(len(self._deferred)):
            factors = self._deferred.popleft()
            if wanted is None or id(factors.weight) in wanted:
                factors.add_matmul(add)
            else:
                self._deferred.append(factors)


class WeightGradientSink:
    """Receives the factors of weight gradients. It adds their matmul by `add` at once; inside `defer_to` it stores the factors.

    The mode is an attribute and not a context variable, because autograd runs the backward of CUDA tensors on a thread of its own.
    """

    def __init__(self, add: AddMatmul = add_to_gradient) -> None:
        self._add = add
        self._queue: WeightQueue | None = None

    def receive(self, factors: GradientFactors) -> None:
        if self._queue is None:
            factors.add_matmul(self._add)
        else:
            self._queue.append(factors)

    @contextmanager
    def defer_to(self, queue: WeightQueue) -> Iterator[None]:
        """Context in which every backward defers its weight gradients to `queue`.

        Raises RuntimeError if the queue has gradients that were never drained, or if another queue is active.
        """
        if queue.pending:
            raise RuntimeError(
                f"the queue still holds {queue.pending} weight gradients of an earlier backward: drain it first"
            )
        if self._queue is not None:
            raise RuntimeError("weight gradients are already being deferred: one queue at a time is active")
        self._queue = queue
        try:
            yield
        finally:
            self._queue = None


class _Matmul(torch.autograd.Function):
    """F.linear whose backward does not compute the weight's gradient, but returns dY and X as the gradients of the taps."""

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
    """Creates the taps of a layer. Its backward passes their gradients, the factors, to the layer's sink."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sink: WeightGradientSink, shapes: _Shapes) -> tuple[Tensor, ...]:
        ctx.weight = weight
        ctx.sink = sink
        return tuple(weight.new_empty((), dtype=dtype).expand(shape) for shape, dtype in shapes)

    @staticmethod
    # pyrefly: ignore [bad-override]  # torch's declaration takes any gradients
    def backward(ctx: Any, *factors: Tensor) -> tuple[None, None, None]:
        # Detached, because an eager x would keep its whole autograd graph in memory.
        tensors = tuple(factor.detach() for factor in factors)
        ctx.sink.receive(GradientFactors(ctx.weight, tensors, tuple(factor._version for factor in factors)))
        return None, None, None


_Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
_ADD_AT_ONCE = WeightGradientSink()


def _new_taps(linear: Linear, tokens: torch.Size) -> tuple[Tensor, ...] | None:
    weight = linear.weight
    if not weight.requires_grad:
        return None
    # New taps in every forward: autograd runs the latest nodes first, so that the gradient is complete before an older node at the
    # block's input (such as FSDP2's hook) collects it.
    return _Taps.apply(weight, linear.gradient_sink or _ADD_AT_ONCE, _tap_shapes(linear, tokens))


def _tap_shapes(linear: Linear, tokens: torch.Size) -> _Shapes:
    weight = linear.weight
    if linear.scaling is not None:
        return fp8.tap_shapes(weight, tokens.numel(), linear.scaling)
    outputs, inputs = weight.shape
    return ((*tokens, outputs), weight.dtype), ((*tokens, inputs), weight.dtype)
