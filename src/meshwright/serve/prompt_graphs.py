"""The forward pass of steps with prompts as CUDA graphs, with attention launched between them.

The host launches about a dozen kernels for each layer. For a prompt of up to about 1,000 tokens of an 8B model this takes longer than the
computation on an H200. The shapes of all operators but attention depend on the number of tokens only. So the pass is captured for some
numbers of tokens, and a step is padded to the next of them. A graph ends where a layer attends, and the next graph begins after it. The
attention between them is launched with the shapes of each step. (vLLM has piecewise graphs of compiled code.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.serve.batch_inputs import StepInputs
from meshwright.serve.cached_attention import AttentionCall, CurrentStep
from meshwright.serve.graphs import Graph

MOST_TOKENS = 2560
"""Tokens of the largest graphs: enough for a usual step of 2,048 prompt tokens and 256 decodes.

An H200 computes such a step of Llama-3-8B in about 60 ms. The host launches its kernels one by one in 28 to 48 ms, which is less. So larger
steps need no graphs.
"""


def prompt_graph_sizes(step_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens to capture, ascending: up to the first that is at least `step_tokens`, or up to `MOST_TOKENS`.

    - The smallest is 64: below it most of the time is that of reading the weights, so smaller graphs would not be faster.
    - From 384 on they are multiples of 128, the width of the tiles into which the library divides matmuls: an H200 takes 15.7 ms for 448
      tokens of Llama-3-8B, and 13.0 for 512.
    - They are not farther apart, because padding costs: 1,024 tokens with 16 decodes took 34.8 ms padded to 1,280, and 29.7 without graphs.
    """
    sizes = (*range(64, 384, 64), *range(384, MOST_TOKENS + 1, 128))
    return sizes[: bisect_left(sizes, step_tokens) + 1]


class GraphMaker(Protocol):
    """Makes a graph of the operations between `begin` and `Graph.end`."""

    def capturing(self) -> AbstractContextManager[None]:
        """Context of several captures."""

    def begin(self) -> Graph:
        """Begin to capture."""


class PromptGraphs:
    """Graphs of `compute`, which computes the normed outputs `(1, tokens, hidden)` of a step's tokens, positions and slots.

    - `step`: the inputs that attention reads.
    - `sizes`: numbers of tokens, ascending. If it is empty, no step has a graph.
    - `groups`: number of groups of layers with slots of their own.
    - `normed` `(1, most tokens, hidden)`: memory for the results.

    All layers must have the same heads and widths, because they share one buffer of queries and one of results of attention.
    """

    def __init__(
        self,
        step: CurrentStep,
        compute: Callable[[StepInputs], Tensor],
        sizes: Sequence[int],
        groups: int,
        normed: Tensor,
    ) -> None:
        assert not sizes or not step.invariant, (
            "graphs cannot be used with invariant steps: their attention has an order of its own"
        )
        self._step = step
        self._compute = compute
        self._sizes = tuple(sizes)
        most = max(self._sizes, default=0)
        device = normed.device
        self._tokens, self._positions = torch.zeros(2, most, dtype=torch.int32, device=device)
        self._slots = torch.full((groups, most), -1, dtype=torch.int32, device=device)
        self._normed = normed
        self._queries = self._attended = normed.new_empty(0)
        self._passes: dict[int, _Pass] = {}

    def capture(self, graphs: GraphMaker) -> None:
        """Capture the graphs of all sizes, the largest first: the others use its memory. Nothing is written into the cache."""
        if not self._sizes:
            return
        assert self._step.absorbs, "graphs need latent attention in its absorbed form"
        with graphs.capturing():
            for size in reversed(self._sizes):
                self._record(size, NoGraphs())  # loads and tunes kernels, which a capture cannot
                self._passes[size] = self._record(size, graphs)

    def run(self, inputs: StepInputs) -> Tensor | None:
        """The result of `compute` for a step, valid until the next one; None if the step has too many tokens for a graph.

        All queries attend to the cache, also those of prompts that begin in this step.
        """
        count = len(inputs.tokens)
        if not self._passes or count > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        for memory, values, padding in (
            (self._tokens, inputs.tokens, 0),
            (self._positions, inputs.positions, 0),
            (self._slots, inputs.slots, -1),
        ):
            memory[..., :count].copy_(values)
            memory[..., count:size].fill_(padding)
        # Results of padding are not used. But a NaN of an earlier step would spread, by scales and router loads that all rows share.
        self._attended[count:size].zero_()
        self._step.inputs = inputs._replace(prompts=())
        queries = self._queries[:count]
        attended = self._attended[:count]
        steps, last = self._passes[size]
        for graph, attend in steps:
            graph.replay()
            attend(queries, attended)
        last.replay()
        return self._normed[:, :count]

    def clear(self) -> None:
        """Free the graphs; the buffers remain."""
        self._passes.clear()

    def _record(self, size: int, graphs: GraphMaker) -> _Pass:
        inputs = self._padding(size)
        recording = _Recording(graphs, partial(self._keep_queries, size))
        self._step.at_attention = recording.split
        try:
            self._normed[:, :size].copy_(self._compute(inputs))
        finally:
            self._step.at_attention = None
        return recording.end()

    def _padding(self, size: int) -> StepInputs:
        """The inputs of the captured pass: views of the memory that `run` fills. They have no sequence, as attention is not captured."""
        empty = self._tokens[:0]
        return StepInputs(
            tokens=self._tokens[:size],
            positions=self._positions[:size],
            slots=self._slots[:, :size],
            block_tables=(),
            context_lengths=empty,
            query_starts=empty,
            decodes=0,
            prompts=(),
            sampled=None,
        )

    def _keep_queries(self, size: int, queries: Tensor, width: int) -> Tensor:
        """Copy queries `(size, heads, …)` to the input of attention. Returns the memory of its results, `(size, heads, width)`."""
        if not self._queries.numel():
            most = self._sizes[-1]
            heads = queries.shape[1]
            self._queries = queries.new_zeros(most, *queries.shape[1:])
            self._attended = queries.new_zeros(most, heads, width)
        self._queries[:size].copy_(queries)
        return self._attended[:size]


class _Pass(NamedTuple):
    """A forward pass in graphs. A graph reads tensors of the one before, so they must be replayed in this order (`serve.graphs`)."""

    steps: list[tuple[Graph, AttentionCall]]
    """Graphs that end with the queries of a layer, and the attention of that layer."""
    last: Graph
    """Graph from the last layer's attention to the end."""


class _Recording:
    """A forward pass while it is captured: each attention ends a graph and begins the next one."""

    def __init__(self, graphs: GraphMaker, keep_queries: Callable[[Tensor, int], Tensor]) -> None:
        self._graphs = graphs
        self._keep_queries = keep_queries
        self._steps: list[tuple[Graph, AttentionCall]] = []
        self._graph = graphs.begin()

    def split(self, queries: Tensor, width: int, attend: AttentionCall) -> Tensor:
        """End the graph with these queries; returns the memory from which the next graph reads their attention."""
        attended = self._keep_queries(queries, width)
        self._graph.end()
        self._steps.append((self._graph, attend))
        self._graph = self._graphs.begin()
        return attended

    def end(self) -> _Pass:
        self._graph.end()
        return _Pass(self._steps, self._graph)


class NoGraphs:
    """Makes graphs that capture nothing: operations between begin and end are computed at once."""

    def capturing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> Graph:
        return self

    def end(self) -> None:
        """Nothing was captured."""

    def replay(self) -> None:
        """Nothing was captured."""
