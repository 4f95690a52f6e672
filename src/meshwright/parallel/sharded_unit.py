"""The weights and gradients of one unit: gathered, freed, summed over micro-batches and reduced together.

A unit's gradient has one owner at a time:

| when | owner | dtype |
|---|---|---|
| during a backward | `.grad` of the gathered weight | compute dtype |
| between the halves of a split backward | the executor's `WeightQueue`, as two factors | compute dtype or fp8 |
| between micro-batches, before the reduction | `GradientAccumulator`, or `.grad` where nothing widens it | `plan.reduce` |
| during the reduction | FSDP2's buffer | `plan.reduce` |
| after the reduction, until the optimizer's update | `.grad` of the shard | dtype of the master weight |

On one rank the reduction moves nothing, and a gradient that no other is added to keeps the compute dtype up to the update.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from meshwright.kernels.linear import AddProduct, WeightGradientSink, add_to_gradient
from meshwright.kernels.sums import add, add_product, matmul
from meshwright.parallel.fsdp import ParameterGroup, ShardedParameter, Span, UnsharedParameterGroup, cast_tensors


class GradientAccumulator:
    """Sums the gradients of a parameter group's gathered weights over micro-batches and hands the sums to the reduction.

    `skip_accumulate` is set for a backward whose gradients are reduced before the unit makes more: they are not widened to the dtype of
    the sum, because the reduction reads them as they are.
    """

    def __init__(self, group: ParameterGroup) -> None:
        self.group = group
        self.skip_accumulate = False
        self._sums: dict[ShardedParameter, torch.Tensor] = {}

    @cached_property
    def _by_gathered_weight(self) -> dict[int, ShardedParameter]:
        return {id(parameter.gathered): parameter for parameter in self.group.parameters}

    def owns(self, weight: torch.Tensor) -> bool:
        """Whether a gathered weight is one of this group's."""
        return id(weight) in self._by_gathered_weight

    def add_product(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add a @ b to the gradient of a gathered weight, in the dtype of the sum, without a separate pass of `accumulate`."""
        parameter = self._by_gathered_weight[id(weight)]
        total, dtype = self._sums.get(parameter), parameter.reduce_dtype or weight.dtype
        if dtype == weight.dtype or (self.skip_accumulate and total is None):
            add_to_gradient(weight, a, b)
        elif total is None:
            self._sums[parameter] = matmul(a, b, dtype)
        else:
            add_product(total, a, b)

    def accumulate(self) -> None:
        """Add the gradients that a backward left in `.grad` of the gathered weights to the sums; nothing with `skip_accumulate`."""
        if self.skip_accumulate:
            return
        for parameter in self.group.parameters:
            self._add_to_sum(parameter)
            gradient, dtype = parameter.gathered.grad, parameter.reduce_dtype
            if gradient is not None and dtype not in (None, gradient.dtype):
                parameter.gathered.grad = None
                self._sums[parameter] = torch.empty_like(gradient, dtype=dtype)
                cast_tensors((self._sums[parameter],), (gradient,))

    def start_reduction(self, span: Span | None) -> None:
        """Start to sum the gradients over ranks. `span` as in `ParameterGroup.gather`."""
        self._hand_over_sums()
        self.group.reduce_scatter(span)

    @property
    def whole_gradients(self) -> list[torch.Tensor]:
        """The gradients of whole weights: sums over micro-batches, and what backwards left in `.grad`."""
        gradients = (parameter.gathered.grad for parameter in self.group.parameters)
        return [*self._sums.values(), *(gradient for gradient in gradients if gradient is not None)]

    def _hand_over_sums(self) -> None:
        # A function of its own: a reference left here would keep a sum's memory until the end of the reduction.
        for parameter in self.group.parameters:
            self._add_to_sum(parameter)  # FSDP2 would too, but slowly where dtypes differ
            total = self._sums.pop(parameter, None)
            if total is not None:
                parameter.set_gradient_sum(total)

    def _add_to_sum(self, parameter: ShardedParameter) -> None:
        """Add the gathered weight's `.grad` to the sum, where a sum exists."""
        total, gradient = self._sums.get(parameter), parameter.gathered.grad
        if total is not None and gradient is not None:
            add(total, gradient)
            parameter.gathered.grad = None


class UnsharedGradientAccumulator(GradientAccumulator):
    """The same on the only rank of a group: the first gradient becomes the shard's, later ones are added to it.

    With `final` no gradient is added to that of one backward, so it keeps its dtype: a wider one would hold the same values.
    """

    def __init__(self, group: UnsharedParameterGroup, *, final: bool) -> None:
        super().__init__(group)
        self._unshared_group, self._final = group, final

    def add_product(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add a @ b to the shard's gradient once a reduction has set it, else as in the base class."""
        kept = self._by_gathered_weight[id(weight)].shard_gradient
        if kept is None:
            super().add_product(weight, a, b)
        else:
            add_product(kept, a, b)

    @torch.no_grad()
    def start_reduction(self, span: Span | None) -> None:
        del span  # nothing is sent
        outputs: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for parameter in self.group.parameters:
            self._add_to_sum(parameter)
            total, single = self._sums.pop(parameter, None), parameter.gathered.grad
            parameter.gathered.grad = None
            gradient, kept = single if total is None else total, parameter.shard_gradient
            if gradient is None:
                continue
            if kept is not None:
                add(kept, gradient)
                continue
            dtype = gradient.dtype if self._final else parameter.stored_dtype
            if gradient.dtype != dtype or not gradient.is_contiguous():
                sources.append(gradient)
                outputs.append(torch.empty(gradient.shape, dtype=dtype, device=gradient.device))
                gradient = outputs[-1]
            parameter.set_shard_gradient(gradient)
        if outputs:
            cast_tensors(outputs, sources)
        self._unshared_group.record_reduction()


class ShardedUnit:
    """The parameters of one unit in one or several groups, gathered, freed and reduced together.

    A block whose experts are spread over ranks has two groups: the experts, then the other weights, which have the most ranks. `uses` is
    the number of units of the schedule that share it: 2 for the two ends of a model with tied weights. It is freed when all of them have
    freed it, and reduced when all have asked for it since the last reduction. `final` as in `UnsharedGradientAccumulator`.
    """

    def __init__(self, groups: Sequence[ParameterGroup], *, uses: int = 1, final: bool = False) -> None:
        self.groups, self.uses = tuple(groups), uses
        self._accumulators = [
            UnsharedGradientAccumulator(group, final=final)
            if isinstance(group, UnsharedParameterGroup)
            else GradientAccumulator(group)
            for group in groups
        ]
        self._communicating = [group for group in groups if group.ranks > 1]
        self._holders = 0
        self._ready_users: set[Hashable] = set()
        self.gradient_sink = WeightGradientSink(_weak(self.add_product))
        """Receives the weight gradients of the unit's linear layers."""
        for parameter in self.linear_weights:
            assert parameter.linear is not None
            parameter.linear.gradient_sink = self.gradient_sink

    def gather(self, span: Span | None = None) -> None:
        """Start to gather the weights on the communication stream, unless they are gathered or being gathered.

        `span` is entered on that stream just before the first collective and left just after the last.
        """
        self._holders += 1
        spans = self._spans(span)
        for group in self.groups:
            group.gather(spans.get(group))

    def wait_for_gather(self) -> None:
        """Make the compute stream wait until the weights are gathered."""
        for group in self.groups:
            group.wait_for_gather()

    def free_gathered(self) -> None:
        """Free the gathered weights, once every user has called this."""
        self._holders -= 1
        if self._holders == 0:
            for group in self.groups:
                group.free_gathered()

    def begin_backward(self, *, skip_accumulate: bool) -> None:
        """Set `GradientAccumulator.skip_accumulate` for the backward that follows."""
        for accumulator in self._accumulators:
            accumulator.skip_accumulate = skip_accumulate

    def add_product(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add a @ b to the gradient of a gathered weight of this unit."""
        self._accumulator_of(weight).add_product(weight, a, b)

    def accumulate(self) -> None:
        """Add the gradients that a backward left to those of earlier micro-batches."""
        for accumulator in self._accumulators:
            accumulator.accumulate()

    def reduce(self, span: Span | None = None, *, user: Hashable = None, last: bool = True) -> bool:
        """Start to sum the whole gradients over ranks; each rank adds its part to its shard's gradient. `span` as in `gather`.

        False, and nothing starts, when another user of the unit has yet to add its part. The `last` call of a step starts in any case, as
        users may reduce at different rhythms.
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
    def reduced_event(self) -> Any:
        """The event of the last group, whose reduction starts after the others on the same stream."""
        return self.groups[-1].reduced_event

    @property
    def gathered_weights(self) -> list[nn.Parameter]:
        """The gathered weights. They exist from the first gather on, also while their memory is freed."""
        return [parameter.gathered for group in self.groups for parameter in group.parameters]

    @property
    def gathered_tensors(self) -> list[torch.Tensor]:
        """Every tensor that a gather fills: the gathered weights, and in fp8 the values that stand for those without memory."""
        low = (parameter.linear.fp8_weight for parameter in self.linear_weights if parameter.linear is not None)
        return [*self.gathered_weights, *(weight.values for weight in low if weight is not None)]

    @property
    def linear_weights(self) -> list[ShardedParameter]:
        """The weights of the unit's linear layers."""
        return [parameter for group in self.groups for parameter in group.parameters if parameter.linear is not None]

    @property
    def whole_gradients(self) -> list[torch.Tensor]:
        """Gradients of whole weights that are not reduced yet."""
        return [gradient for accumulator in self._accumulators for gradient in accumulator.whole_gradients]

    @property
    def gradient_shards(self) -> list[torch.Tensor]:
        """This rank's part of every gradient, as plain tensors."""
        shards = (parameter.shard_gradient for group in self.groups for parameter in group.parameters)
        return [shard for shard in shards if shard is not None]

    def _accumulator_of(self, weight: torch.Tensor) -> GradientAccumulator:
        return next(accumulator for accumulator in self._accumulators if accumulator.owns(weight))

    def _spans(self, span: Span | None) -> dict[ParameterGroup, Span]:
        """The context of each group's collective, so that `span` covers all of them."""
        if span is None or not self._communicating:
            return {}
        if len(self._communicating) == 1:
            return {self._communicating[0]: span}
        opened = ExitStack()
        return {self._communicating[0]: _entering(span, opened), self._communicating[-1]: _leaving(opened)}


@contextmanager
def _entering(span: Span, opened: ExitStack) -> Iterator[None]:
    opened.enter_context(span)
    yield


@contextmanager
def _leaving(opened: ExitStack) -> Iterator[None]:
    yield
    opened.close()


def _weak(add: AddProduct) -> AddProduct:
    """The bound method `add` without a reference to its object.

    A layer refers to its sink, and a unit to its layers. With a strong reference back, an engine would stay in memory until Python
    collects garbage.
    """
    method = weakref.WeakMethod(add)

    def call(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        bound = method()
        assert bound is not None, "the executor keeps the unit for as long as backwards run"
        bound(weight, a, b)

    return call
