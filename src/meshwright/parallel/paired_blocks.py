"""Two micro-batches in one block with experts at a time: the token exchange of each overlaps with the compute of the other.

The schedule `paired` has the forwards of two micro-batches A and B in one action, and their backwards in another. A block with experts has
three parts (`parallel.block_parts`). Rows go to the ranks of their experts after the part `route` and return after `compute`. The order is

    route A, route B, compute A, compute B, combine A, combine B

The exchange of A's rows starts after route A, and compute A waits for it. Meanwhile route B runs. The other exchanges overlap in the same
way. Each part is an autograd graph of its own. The backward runs the parts in the opposite order and exchanges the gradients between them.

A visit is one micro-batch in one block: its forward and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.models.decoder import SharedInputs
from meshwright.models.moe import RoutedOutput
from meshwright.parallel.block_parts import BlockParts
from meshwright.parallel.experts import RowsOnTheWay, exchange_loads, start_exchange
from meshwright.parallel.offload import leaf_without_memory
from meshwright.parallel.timetable import Visit
from meshwright.parallel.unit_exchange import UnitExchange

RouterLoss = Callable[[RoutedOutput], Tensor | None]
"""Function that adds the routing statistics of an output to the step's; returns the router's loss, or None if it has no weight."""


class PairedBlocks:
    """The blocks of a step in which two micro-batches run together, kept from their forward until their backward.

    `exchange` supplies the inputs of blocks and receives their outputs; these have no autograd graph.
    """

    def __init__(self, exchange: UnitExchange) -> None:
        self._exchange = exchange
        self._blocks: dict[Visit, PairedBlock] = {}

    def forward(self, visits: Sequence[Visit], blocks: Sequence[PairedBlock], shared: Sequence[SharedInputs]) -> None:
        """Run the forward of `blocks`, one for each visit, part by part for all of them."""
        for visit, block, inputs in zip(visits, blocks, shared, strict=True):
            block.route(self._exchange.take("activation", visit).requires_grad_(), inputs)
        for block in blocks:
            block.compute()
        for visit, block in zip(visits, blocks, strict=True):
            self._blocks[visit] = block
            self._exchange.pass_on("activation", visit, block.combine())

    def backward(self, visits: Sequence[Visit], after_part: Callable[[], None]) -> None:
        """Run the backwards of the parts in the opposite order; call `after_part` after each part."""
        reverse = [(visit, self._blocks.pop(visit)) for visit in reversed(visits)]
        for visit, block in reverse:
            block.combine_backward(self._exchange.take("gradient", visit))
            after_part()
        for _, block in reverse:
            block.compute_backward()
            after_part()
        for visit, block in reverse:
            self._exchange.pass_on("gradient", visit, block.route_backward())
            after_part()


class PairedBlock:
    """One micro-batch in one block, from the forward of `route` to the backward of `route`. Each part runs once.

    `choose` is called before the router runs and sets the experts if recorded routing is replayed. `router_loss` is called after it.
    """

    def __init__(self, parts: BlockParts, router_loss: RouterLoss, choose: Callable[[], None]) -> None:
        self._parts = parts
        self._router_loss = router_loss
        self._choose = choose
        self._graphs: list[_PartGraph] = []
        """Graphs of the parts whose backward has not run, in the order of their forwards."""

    def route(self, x: Tensor, shared: SharedInputs) -> None:
        """Run `route` for x `(batch, seq, hidden)`, a leaf that needs a gradient, and start to send its rows."""
        self._choose()
        routed = self._parts.route(x, *shared.of(self._parts.attention_kind), shared.counted)
        loss = self._router_loss(RoutedOutput(routed.x, routed.balance, routed.load, routed.squares))
        outputs = [routed.x, routed.normed, routed.weights, routed.sent]
        self._graphs.append(_PartGraph.of([x], outputs if loss is None else [*outputs, loss]))
        self._loss_gradient = [] if loss is None else [torch.ones_like(loss)]
        self._for_combine = _leaf(routed.normed), _leaf(routed.weights), routed.order, routed.sent_order
        self._x = routed.x.detach()
        self._received_loads, self._splits = exchange_loads(
            routed.sent_load, self._parts.exchange.group, self._parts.exchange.ranks, self._parts.local
        )
        self._row_count = routed.sent.shape[0]
        self._moving = self._start(routed.sent.detach(), None, back=False)

    def compute(self) -> None:
        """Run `compute` for the rows that arrive, and start to send its outputs back."""
        # Neither the received rows nor x are saved for the backward, so their leaves must not hold them.
        leaf, received = leaf_without_memory(self._moving.wait())
        self._received_count = received.shape[0]
        outputs = self._parts.compute(received, self._received_loads)
        self._graphs.append(_PartGraph.of([leaf], [outputs]))
        self._moving = self._start(outputs.detach(), self._row_count, back=True)

    def combine(self) -> Tensor:
        """Run `combine` for the outputs that return. Returns the block's output without its graph."""
        leaf, x = leaf_without_memory(self._x)
        returned = _leaf(self._moving.wait())
        normed, weights, *orders = self._for_combine
        y = self._parts.combine(x, normed, returned, weights, *orders)
        self._graphs.append(_PartGraph.of([leaf, normed, returned, weights], [y]))
        del self._moving, self._x, self._for_combine
        return y.detach()

    def combine_backward(self, gradient: Tensor) -> None:
        """Run the backward of `combine`, and start to send the gradients of the returned outputs to the ranks of the experts."""
        x, normed, returned, weights = self._graphs.pop().backward([gradient])
        assert returned is not None
        self._gradients = x, normed, weights
        self._moving = self._start(returned, self._received_count, back=False)

    def compute_backward(self) -> None:
        """Run the backward of `compute`, and start to send the gradients of the received rows back."""
        (received,) = self._graphs.pop().backward([self._moving.wait()])
        assert received is not None
        self._moving = self._start(received, self._row_count, back=True)

    def route_backward(self) -> Tensor:
        """Run the backward of `route`. Returns the gradient of the block's input."""
        gradients = [*self._gradients, self._moving.wait(), *self._loss_gradient]
        del self._moving, self._gradients
        (x,) = self._graphs.pop().backward(gradients)
        assert x is not None
        return x

    def _start(self, sent: Tensor, count: int | None, *, back: bool) -> RowsOnTheWay:
        return start_exchange(sent, self._splits, count, back, self._parts.exchange.group, asynchronous=True)


class _PartGraph(NamedTuple):
    """The autograd graph of one part: its `inputs`, which are leaves, and the graph edges of its outputs.

    It references edges and not the outputs, so that the memory of outputs can be freed.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[GradientEdge]

    @classmethod
    def of(cls, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> _PartGraph:
        return cls(inputs, [get_gradient_edge(output) for output in outputs])

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs from the gradients of the outputs. A gradient is None where there is no influence."""
        edges = [edge for edge, gradient in zip(self.outputs, gradients, strict=True) if gradient is not None]
        torch.autograd.backward(edges, [gradient for gradient in gradients if gradient is not None])
        return [leaf.grad for leaf in self.inputs]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()
