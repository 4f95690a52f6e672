"""The forward pass of steps with prompts as a sequence of CUDA graphs, between which the host launches attention.

The host launches about a dozen kernels for each layer. For a prompt of up to about 1,000 tokens of an 8B model this takes longer than the
computation on an H200.

The shapes of all operators except attention depend only on the number of tokens of the step. So the forward pass is captured for some
numbers of tokens, and a step is padded to the next larger of them. Each attention ends a graph, and the next graph begins after the
attention. The host launches attention with the shapes of the current step. (vLLM has piecewise graphs of compiled code.)
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
"""Number of tokens of the largest graphs. It is enough for a usual step of 2,048 prompt tokens and 256 decodes.

For Llama-3-8B, an H200 computes a step of this size in about 60 ms, and the host needs only 28 to 48 ms to launch its kernels one by one.
So larger steps would not be faster with graphs.
"""


def prompt_graph_sizes(step_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens for which graphs are captured, ascending: 64, 128, …, 320, 384, 512, 640, …, 2560.

    The result ends with the first number that is at least `step_tokens`. The reasons, with times of Llama-3-8B on an H200:

    - Graphs of fewer than 64 tokens would not be faster: reading the weights takes most of their time.
    - From 384 on, all numbers are multiples of 128, the tile width of the matmuls. 448 tokens take 15.7 ms, but 512 tokens only 13.0 ms.
    - With larger distances, padding would cost too much. 1,024 prompt tokens with 16 decodes took 34.8 ms padded to 1,280 tokens, and
      29.7 ms without graphs.
    """
    sizes = (*range(64, 384, 64), *range(384, MOST_TOKENS + 1, 128))
    return sizes[: bisect_left(sizes, step_tokens) + 1]


class GraphMaker(Protocol):
    """An object that captures graphs: `Graphs`, or `NoGraphs` for a run without capture."""

    def capturing(self) -> AbstractContextManager[None]:
        """Return a context in which graphs can be captured."""

    def begin(self) -> Graph:
        """Begin a graph. It captures all operations until its `end` is called."""


class PromptGraphs:
    """The CUDA graphs of the forward pass of steps with prompts.

    - `step`: the object from which attention reads the inputs of the current step.
    - `compute`: the forward pass. It returns the normed outputs `(1, tokens, hidden)` for the tokens, positions and slots of a step.
    - `sizes`: numbers of tokens for which graphs are captured, ascending. If it is empty, there are no graphs.
    - `groups`: number of groups of layers. Each group has its own slots.
    - `normed`: `(1, largest number of tokens, hidden)`: memory for the results.

    All layers must have queries of the same shape and attention results of the same shape, because all layers share one buffer for queries
    and one buffer for attention results.
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
        largest = max(self._sizes, default=0)
        device = normed.device
        self._tokens, self._positions = torch.zeros(2, largest, dtype=torch.int32, device=device)
        self._slots = torch.full((groups, largest), -1, dtype=torch.int32, device=device)
        self._normed = normed
        self._queries = self._attended = normed.new_empty(0)
        self._passes: dict[int, _Pass] = {}

    def capture(self, graphs: GraphMaker) -> None:
        """Capture the graphs of all sizes. The largest comes first, so that the others can use its memory. The cache is not changed."""
        if not self._sizes:
            return
        assert self._step.absorbs, "graphs need latent attention in its absorbed form"
        with graphs.capturing():
            for size in reversed(self._sizes):
                # This run loads and tunes kernels, which is not possible during a capture.
                self._record(size, NoGraphs())
                self._passes[size] = self._record(size, graphs)

    def run(self, inputs: StepInputs) -> Tensor | None:
        """Compute a step with graphs. Returns the normed outputs `(1, tokens, hidden)`, which are valid until the next call.

        Returns None if there is no graph with enough tokens. All queries read keys and values from the cache, also the queries of prompts
        that begin in this step.
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
        # The results of padding are not used. But a NaN that an earlier step has left there could spread to all rows of the step, through
        # the scales of rounding and the router loads.
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
        """Free the graphs. The buffers keep their memory."""
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
        """Return the inputs of a captured forward pass: views of the memory that `run` fills.

        They have no sequences, because attention is not captured.
        """
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
        """Copy queries `(size, heads, …)` into the buffer that attention reads.

        Returns the buffer into which attention writes its results, `(size, heads, width)`.
        """
        if not self._queries.numel():
            largest = self._sizes[-1]
            heads = queries.shape[1]
            self._queries = queries.new_zeros(largest, *queries.shape[1:])
            self._attended = queries.new_zeros(largest, heads, width)
        self._queries[:size].copy_(queries)
        return self._attended[:size]


class _Pass(NamedTuple):
    """The graphs of one forward pass. Each graph reads tensors of the graph before it, so they must be replayed in this order."""

    steps: list[tuple[Graph, AttentionCall]]
    """For each layer, the graph that ends with the layer's queries, and the function that computes the layer's attention."""
    last: Graph
    """The graph from the attention of the last layer to the end of the forward pass."""


class _Recording:
    """The capture of one forward pass. Each attention ends a graph and begins the next graph."""

    def __init__(self, graphs: GraphMaker, keep_queries: Callable[[Tensor, int], Tensor]) -> None:
        self._graphs = graphs
        self._keep_queries = keep_queries
        self._steps: list[tuple[Graph, AttentionCall]] = []
        self._graph = graphs.begin()

    def split(self, queries: Tensor, width: int, attend: AttentionCall) -> Tensor:
        """End a graph at an attention, and begin the next graph. It is used as `CurrentStep.at_attention`.

        Returns the buffer into which `attend` will write its result, `(tokens, heads, width)`. The next graph reads it from there.
        """
        attended = self._keep_queries(queries, width)
        self._graph.end()
        self._steps.append((self._graph, attend))
        self._graph = self._graphs.begin()
        return attended

    def end(self) -> _Pass:
        self._graph.end()
        return _Pass(self._steps, self._graph)


class NoGraphs:
    """A `GraphMaker` that captures nothing: the operations between `begin` and `end` run immediately."""

    def capturing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> Graph:
        return self

    def end(self) -> None:
        """Nothing was captured."""

    def replay(self) -> None:
        """Nothing was captured."""
