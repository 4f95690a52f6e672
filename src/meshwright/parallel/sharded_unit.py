"""Gathers and frees the parameters of one unit, sums their gradients over micro-batches and reduces them over ranks.

A unit is a part of the model whose parameters are gathered and reduced together: embedding, block, or head. At each time one object holds
the unit's gradient:

| when | holder | dtype |
|---|---|---|
| during a backward | `.grad` of the gathered weight | compute dtype |
| between the halves of a split backward | the executor's `WeightQueue`, as two factors | compute dtype or fp8 |
| between micro-batches, before the reduction | `GradientAccumulator`, or `.grad` if the dtypes are equal | `plan.reduce` |
| during the reduction | FSDP2's buffer | `plan.reduce` |
| after the reduction, until the optimizer's update | `.grad` of the shard | dtype of the master weight, or that of `plan.accumulation` |

On one rank the reduction sends nothing, and the gradient of a single backward keeps the compute dtype until the update.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.kernels.linear import AddMatmul, WeightGradientSink, add_to_gradient
from meshwright.kernels.sums import add, add_matmul, matmul
from meshwright.parallel.fsdp import ParameterGroup, ShardedParameter, Span, UnsharedParameterGroup, cast_tensors

if TYPE_CHECKING:
    from meshwright.parallel.copied_weights import CopiedParameterGroup, StackedWeight

    Group = ParameterGroup | CopiedParameterGroup
    Weight = ShardedParameter | StackedWeight


class GradientAccumulator:
    """Sums the gradients of a parameter group's gathered weights over micro-batches and passes the sums to the reduction.

    `skip_accumulate` is True during a backward whose gradients are reduced before the next backward of the unit. The reduction reads such
    gradients directly, so they are not cast to the wider dtype of the sum.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.skip_accumulate = False
        self._sums: dict[Weight, torch.Tensor] = {}

    @classmethod
    def of(cls, group: Group, *, single_backward: bool = False) -> GradientAccumulator:
        """Return an accumulator for a group: an `UnsharedGradientAccumulator` on a single rank, else a `GradientAccumulator`.

        `single_backward` is passed to the former.
        """
        if isinstance(group, UnsharedParameterGroup):
            return UnsharedGradientAccumulator(group, single_backward=single_backward)
        return cls(group)

    @cached_property
    def _by_gathered_weight(self) -> dict[int, Weight]:
        return {id(parameter.gathered): parameter for parameter in self.group.parameters}

    def owns(self, weight: torch.Tensor) -> bool:
        """Whether a gathered weight belongs to this group."""
        return id(weight) in self._by_gathered_weight

    def add_matmul(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the matrix product a @ b to the gradient of a gathered weight, in the dtype of the sum.

        The product is then already in the sum and `accumulate` need not add it in a separate pass.
        """
        parameter = self._by_gathered_weight[id(weight)]
        total = self._sums.get(parameter)
        dtype = parameter.reduce_dtype or weight.dtype
        if dtype == weight.dtype or (self.skip_accumulate and total is None):
            add_to_gradient(weight, a, b)
        elif total is None:
            self._sums[parameter] = matmul(a, b, dtype)
        else:
            add_matmul(total, a, b)

    def accumulate(self) -> None:
        """Add `.grad` of the gathered weights to the sums, after a backward; no effect with `skip_accumulate`."""
        if self.skip_accumulate:
            return
        for parameter in self.group.parameters:
            self._add_to_sum(parameter)
            gradient = parameter.gathered.grad
            dtype = parameter.reduce_dtype
            if gradient is not None and dtype not in (None, gradient.dtype):
                parameter.gathered.grad = None
                self._sums[parameter] = torch.empty_like(gradient, dtype=dtype)
                cast_tensors((self._sums[parameter],), (gradient,))

    def set_sum(self, parameter: Weight, total: torch.Tensor) -> None:
        """Set the gradient sum of a weight that the next reduction reduces."""
        self._sums[parameter] = total

    def start_reduction(self, span: Span | None) -> None:
        """Start to sum the gradients over ranks.

        `span` is a profiler span: a context manager that is entered on the communication stream just before the collective.
        """
        self._hand_over_sums()
        self.group.reduce_scatter(span)

    @property
    def whole_gradients(self) -> list[torch.Tensor]:
        """The gradients of gathered weights that are not reduced yet: sums over micro-batches, and `.grad`."""
        gradients = (parameter.gathered.grad for parameter in self.group.parameters)
        return [*self._sums.values(), *(gradient for gradient in gradients if gradient is not None)]

    def _hand_over_sums(self) -> None:
        # A function of its own, because a local variable of the caller would keep a sum's memory until the end of the reduction.
        for parameter in self.group.parameters:
            self._add_to_sum(parameter)  # FSDP2 would add it too, but slowly if dtypes differ
            total = self._sums.pop(parameter, None)
            if total is not None:
                parameter.set_gradient_sum(total)

    def _add_to_sum(self, parameter: Weight) -> None:
        """Add the gathered weight's `.grad` to the sum, if a sum exists."""
        total = self._sums.get(parameter)
        gradient = parameter.gathered.grad
        if total is not None and gradient is not None:
            add(total, gradient)
            parameter.gathered.grad = None


class UnsharedGradientAccumulator(GradientAccumulator):
    """A `GradientAccumulator` on one rank: the first gradient becomes the gradient of the shard, later gradients are added to it.

    `single_backward` says that each step has a single backward. The gradient then keeps the compute dtype, because nothing is added to it
    and a wider dtype would have the same values.
    """

    def __init__(self, group: UnsharedParameterGroup, *, single_backward: bool) -> None:
        super().__init__(group)
        self._unshared_group = group
        self._single_backward = single_backward

    def add_matmul(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add a @ b to the shard's gradient if an earlier `start_reduction` has set it, else as in the base class."""
        shard_gradient = self._by_gathered_weight[id(weight)].shard_gradient
        if shard_gradient is None:
            super().add_matmul(weight, a, b)
        else:
            add_matmul(shard_gradient, a, b)

    @torch.no_grad()
    def start_reduction(self, span: Span | None) -> None:
        """Move the gradients to the shards. There is no collective, so `span` is not used."""
        del span
        outputs: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for parameter in self._unshared_group.parameters:
            self._add_to_sum(parameter)
            total = self._sums.pop(parameter, None)
            latest = parameter.gathered.grad
            parameter.gathered.grad = None
            gradient = latest if total is None else total
            shard_gradient = parameter.shard_gradient
            if gradient is None:
                continue
            if shard_gradient is not None:
                add(shard_gradient, gradient)
                continue
            sum_dtype = self._unshared_group.sum_dtype or parameter.stored_dtype
            dtype = gradient.dtype if self._single_backward else sum_dtype
            if gradient.dtype != dtype or not gradient.is_contiguous():
                sources.append(gradient)
                outputs.append(torch.empty(gradient.shape, dtype=dtype, device=gradient.device))
                gradient = outputs[-1]
            parameter.set_shard_gradient(gradient)
        if outputs:
            cast_tensors(outputs, sources)
        self._unshared_group.record_reduction()


class ShardedUnit:
    """The parameters of one unit, in one FSDP group or several.

    A block whose experts are distributed over ranks has two groups. First the experts, then the other weights, which are sharded over more
    ranks. `uses` is the number of schedule units that share the parameters. It is 2 if embedding and head with a tied weight are on one
    rank, else 1. The gathered weights are freed when every user has freed them. The gradients are reduced when every user has called
    `reduce`. `single_backward` says that each step has a single backward; it is used only on one rank (`UnsharedGradientAccumulator`).
    """

    def __init__(self, groups: Sequence[Group], *, uses: int = 1, single_backward: bool = False) -> None:
        self.groups = tuple(groups)
        self.uses = uses
        self._accumulators = [GradientAccumulator.of(group, single_backward=single_backward) for group in groups]
        self._sharded_groups = [group for group in groups if group.ranks > 1]
        self._current_users = 0
        self._ready_users: set[Hashable] = set()
        self.gradient_sink = WeightGradientSink(_weak_method(self.add_matmul))
        """Receives the weight gradients of the unit's linear layers."""
        for parameter in self.linear_weights:
            assert parameter.linear is not None
            parameter.linear.gradient_sink = self.gradient_sink

    def gather(self, span: Span | None = None) -> None:
        """Start to gather the weights on the communication stream, unless they are gathered or being gathered.

        `span` is entered on that stream just before the first collective and left just after the last.
        """
        self._current_users += 1
        spans = self._spans(span)
        for group in self.groups:
            group.gather(spans.get(group))

    @property
    def gathering(self) -> bool:
        """Whether an all-gather between ranks has started and compute has not waited for it yet."""
        return any(group.gathering for group in self._sharded_groups)

    def wait_for_collectives(self) -> None:
        """Make the compute stream wait for the started all-gathers, but not for the copies out of their buffers."""
        for group in self._sharded_groups:
            group.wait_for_collective()

    @cached_property
    def reads_shards_in_use(self) -> bool:
        """Whether `wait_for_gather` is the first moment at which the shards are read. True on one rank, where compute casts them."""
        return all(isinstance(group, UnsharedParameterGroup) for group in self.groups)

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered weights of all groups with more than one rank."""
        return sum(group.gathered_bytes for group in self._sharded_groups)

    def wait_for_gather(self) -> None:
        """Make the compute stream wait until the weights are gathered."""
        for group in self.groups:
            group.wait_for_gather()

    def free_gathered(self, *, last: bool = True) -> None:
        """Free the gathered weights when this was called as often as `gather`.

        Groups with `stays_gathered` are freed only at the `last` call of a step.
        """
        self._current_users -= 1
        if self._current_users == 0:
            for group in self.groups:
                if last or not group.stays_gathered:
                    group.free_gathered()

    def begin_backward(self, *, skip_accumulate: bool) -> None:
        """Set `GradientAccumulator.skip_accumulate` for the backward that follows."""
        for accumulator in self._accumulators:
            accumulator.skip_accumulate = skip_accumulate

    def add_matmul(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add a @ b to the gradient of a gathered weight of this unit."""
        self._accumulator_of(weight).add_matmul(weight, a, b)

    def accumulate(self) -> None:
        """Add the gradients of a backward to those of earlier micro-batches."""
        for accumulator in self._accumulators:
            accumulator.accumulate()

    def reduce(self, span: Span | None = None, *, user: Hashable = None, last: bool = True) -> bool:
        """Start the reduce-scatter of the gradients; each rank adds its part of the result to the gradient of its shard.

        With several users the reduction starts when all of them have called `reduce` since the last reduction. Until then the call returns
        False and does nothing else. The `last` call of a step always starts the reduction, because users may reduce after different numbers
        of micro-batches. `span` is entered on the communication stream just before the first collective and left just after the last.
        """
        self._ready_users.add(user)
        if len(self._ready_users) < self.uses and not last:
            return False
        self._ready_users.clear()
        spans = self._spans(span)
        for accumulator in self._accumulators:
            accumulator.start_reduction(spans.get(accumulator.group))
        return True

    def finish_reductions(self) -> None:
        """Make the compute stream wait for every reduction that was started."""
        for group in self.groups:
            group.finish_reductions()

    @property
    def reduced_events(self) -> list[Any]:
        """The events after which the gradients of each group are reduced; empty on a CPU."""
        return [group.reduced_event for group in self.groups if group.reduced_event is not None]

    @property
    def gathered_weights(self) -> list[nn.Parameter]:
        """The gathered weights. The tensors exist from the first gather on, even while their memory is freed."""
        return [parameter.gathered for group in self.groups for parameter in group.parameters]

    @property
    def gathered_tensors(self) -> list[torch.Tensor]:
        """Every tensor that a gather fills: the gathered weights, and the fp8 values of weights that are gathered in fp8."""
        fp8_weights = (parameter.linear.fp8_weight for parameter in self.linear_weights if parameter.linear is not None)
        return [*self.gathered_weights, *(weight.values for weight in fp8_weights if weight is not None)]

    @property
    def linear_weights(self) -> list[ShardedParameter]:
        """The weights of the unit's linear layers."""
        return [parameter for group in self.owners for parameter in group.parameters if parameter.linear is not None]

    @property
    def whole_gradients(self) -> list[torch.Tensor]:
        """All gradients of gathered weights that are not reduced yet, of all groups."""
        return [gradient for accumulator in self._accumulators for gradient in accumulator.whole_gradients]

    @property
    def owners(self) -> list[ParameterGroup]:
        """The groups whose shards the optimizer updates."""
        return [group.owner for group in self.groups]

    @property
    def gradient_shards(self) -> list[torch.Tensor]:
        """This rank's shard of every gradient that exists, as local tensors (not DTensors)."""
        shards = (parameter.shard_gradient for group in self.groups for parameter in group.parameters)
        return [shard for shard in shards if shard is not None]

    def _accumulator_of(self, weight: torch.Tensor) -> GradientAccumulator:
        return next(accumulator for accumulator in self._accumulators if accumulator.owns(weight))

    def _spans(self, span: Span | None) -> dict[Group, Span]:
        """Context managers by group such that `span` is entered before the first group's collective and left after the last group's."""
        if span is None or not self._sharded_groups:
            return {}
        if len(self._sharded_groups) == 1:
            return {self._sharded_groups[0]: span}
        stack = ExitStack()
        return {self._sharded_groups[0]: _enter_span(span, stack), self._sharded_groups[-1]: _exit_span(stack)}


@contextmanager
def _enter_span(span: Span, stack: ExitStack) -> Iterator[None]:
    stack.enter_context(span)
    yield


@contextmanager
def _exit_span(stack: ExitStack) -> Iterator[None]:
    yield
    stack.close()


def _weak_method(add: AddMatmul) -> AddMatmul:
    """Return a function that calls the bound method `add` but keeps only a weak reference to its object.

    A layer references its gradient sink, and a unit references its layers. If the sink referenced the unit, this cycle would keep a whole
    engine in memory until Python collects garbage.
    """
    method = weakref.WeakMethod(add)

    def call(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        bound = method()
        assert bound is not None, "the executor references the unit while backwards run"
        bound(weight, a, b)

    return call
