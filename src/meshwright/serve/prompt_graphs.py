"""The forward pass of steps with prompts as CUDA graphs, between which the host launches attention.

The host launches about a dozen kernels for each layer. For a prompt of up to about 1,000 tokens of an 8B model this takes longer than an
H200 computes. The shapes of all operators but attention depend on the number of tokens only. So the pass is captured for some numbers of
tokens, to which steps are padded: a graph ends where a layer attends, and the next graph begins after that attention, which is launched
with the shapes of each step. (vLLM has piecewise graphs of compiled code.)
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
"""Tokens of the largest graphs.

They hold a usual step of 2,048 prompt tokens and 256 decodes. An H200 computes such a step of Llama-3-8B in about 60 ms, which hides the
28 to 48 ms in which the host launches its kernels one by one. So larger steps need no graphs.
"""


def prompt_graph_sizes(step_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens to capture, ascending, up to the first that holds `step_tokens`, or to `MOST_TOKENS`.

    Below 64 tokens most of the time goes into reading the weights: smaller graphs would not be faster. From 384 on sizes are multiples of
    128, the width of the tiles into which the library divides products: an H200 takes 15.7 ms for 448 tokens of Llama-3-8B, 13.0 for 512.
    They are no farther apart, as padding costs: 1,024 tokens beside 16 decodes took 34.8 ms when padded to 1,280, 29.7 without graphs.
    """
    sizes = (*range(64, 384, 64), *range(384, MOST_TOKENS + 1, 128))
    return sizes[: bisect_left(sizes, step_tokens) + 1]


class GraphMaker(Protocol):
    """Makes graphs of what runs between `begin` and `Graph.end`."""

    def capturing(self) -> AbstractContextManager[None]:
        """Context of several captures."""

    def begin(self) -> Graph:
        """Begin to capture."""


class PromptGraphs:
    """Graphs of `compute`, which maps a step's tokens, positions and slots to its normed outputs `(1, tokens, hidden)`.

    `step` has the inputs that attention reads. `sizes` are the numbers of tokens, ascending; without any, no step has a graph. `groups` is
    the number of groups of layers with slots of their own. `normed` receives the results, `(1, most tokens, hidden)`. All layers must have
    the same heads and widths: they share one buffer of queries and one of results of attention.
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
        """Capture the graphs of all sizes; they write nothing into the cache. The largest come first: the others use their memory."""
        if not self._sizes:
            return
        assert self._step.absorbs, "graphs need latent attention in its absorbed form"
        with graphs.capturing():
            for size in reversed(self._sizes):
                self._record(size, NoGraphs())  # loads and tunes kernels, which a capture cannot
                self._passes[size] = self._record(size, graphs)

    def run(self, inputs: StepInputs) -> Tensor | None:
        """Return `compute` of a step, valid until the next one; None if the step has too many tokens for a graph.

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
        # Results of padding are not used, but a NaN of an earlier step would spread by scales and router loads of all rows.
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
        """The inputs of the captured pass: views of the memory that `run` fills. No sequence is in them, as nothing attends."""
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
        """Copy queries `(size, heads, …)` to the input of attention; returns the memory of its results, `(size, heads, width)`."""
        if not self._queries.numel():
            most = self._sizes[-1]
            heads = queries.shape[1]
            self._queries = queries.new_zeros(most, *queries.shape[1:])
            self._attended = queries.new_zeros(most, heads, width)
        self._queries[:size].copy_(queries)
        return self._attended[:size]


class _Pass(NamedTuple):
    """A forward pass in graphs, which pass tensors on and so must be replayed in this order (`serve.graphs`)."""

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
    """Makes graphs that capture nothing: what runs between begin and end computes at once."""

    def capturing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> Graph:
        return self

    def end(self) -> None:
        """Nothing was captured."""

    def replay(self) -> None:
        """Nothing was captured."""
