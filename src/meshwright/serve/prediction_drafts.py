"""Drafts by the model's own modules for multi-token prediction (DeepSeek-AI 2024, arXiv 2412.19437, §2.2).

Once a step is checked, the modules compute all its tokens, and each draws one draft for the next step. Their cache layers come after the
model's, in the same blocks. They read only from the device: the number of accepted drafts selects the position after which they draw.

Two kinds of a module's cache entries may come from tokens that are not in the text. The last entry of a cached prefix comes from the token
that followed the prefix in another text. For modules after the first, an entry may come from a rejected draft. Such entries change the
drafts, never the text.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.policies.drafting import DraftPauses
from meshwright.serve.batch_inputs import BatchInputs, PackedStep
from meshwright.serve.drafts import CheckedStep, SampledDrafter
from meshwright.serve.model_runner import ModelRunner, drafted_sizes
from meshwright.serve.sampling import Sampler
from meshwright.serve.speculation import Drafts, draft_tokens, likeliest_tokens


class ModuleInputs(NamedTuple):
    """Inputs of the first prediction module for a checked step, beside the inputs of the model."""

    following: Tensor
    """`(tokens,)` int64: the token after each one of the step; arbitrary behind the newest."""
    last: Tensor
    """`(sequences,)` int64: index in the step of the token after which the newest one was drawn, by request that got one."""
    table_rows: Tensor
    """`(sequences,)` int64: the table rows of these requests."""
    positions: Tensor
    """`(sequences,)` int64: positions of the first drafts."""


class PredictionDrafter(SampledDrafter):
    """Each module draws one draft after every step, even if the step had none: the plan of the next step decides which are used.

    On CUDA the modules have one graph for each shape of a step that has only decodes, like the model.
    """

    def __init__(
        self, drafts: int, pauses: DraftPauses, runner: ModelRunner, inputs: BatchInputs, sampler: Sampler
    ) -> None:
        super().__init__(drafts, pauses, inputs, sampler)
        self._runner = runner
        self._tokens = torch.zeros(inputs.padding_row + 1, drafts, dtype=torch.int64, device=inputs.device)
        """`(table_rows + 1, drafts)`: the next drafts of each table row."""
        self._probabilities = torch.empty(0)
        """`(table_rows + 1, drafts, vocab)`: distributions of the drafts; none before a request draws its tokens."""
        self._graph_inputs = ModuleInputs(*[torch.empty(0)] * 4)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture the modules for each shape of a step that has a graph of the model."""
        sizes = self._runner.decode_sizes
        shapes = [(size, 1 + self.longest) for size in drafted_sizes(sizes, self.longest)]
        shapes += [(size, 1) for size in sizes]
        lengths = (max(size * queries for size, queries in shapes), *3 * (max(sizes),))
        self._graph_inputs = ModuleInputs(
            *(torch.zeros(count, dtype=torch.int64, device=self._inputs.device) for count in lengths)
        )
        self._graph_inputs.table_rows.fill_(self._inputs.padding_row)
        for size, queries in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
            packed = self._inputs.pack_padding(size, queries)
            for drawn in (True, False):
                self._graphs.capture((size, queries, drawn), self._call_of_graph(packed, drawn))

    def follow(self, packed: PackedStep) -> None:
        """Put the drafts that the step before has drawn into a packed step."""
        drafts = packed.drafts
        self._drafts = None
        if drafts is None:
            return
        rows = drafts.table_rows.long()
        longest = drafts.tokens.shape[1]
        tokens = self._tokens[rows, :longest]
        self._place_drafts(packed, drafts, tokens)
        if not self._sampler.greedy and self._probabilities.numel():
            # Those of a request that takes the likeliest tokens may be older than its drafts: it accepts the same with any.
            self._drafts = Drafts(tokens, self._probabilities[rows, :longest])

    def draw_next(self, packed: PackedStep, checked: CheckedStep) -> None:
        """Compute the modules for the tokens of a checked step, and draw the drafts of the next one."""
        inputs = _module_inputs(packed, checked)
        drawn = not self._sampler.greedy and bool(len(checked.newest))
        self._sampler.copy_options()  # a graph only reads them
        if packed.decode_size is None:
            self._draw(packed, self._runner.normed, inputs, drawn)
            return
        key = (packed.decode_size, packed.decode_queries, drawn)
        if not self._graphs.holds(key):
            self._draw(packed, self._runner.normed, inputs, drawn)
            return
        for ours, theirs in zip(self._graph_inputs, inputs, strict=True):
            ours[: len(theirs)] = theirs
        count = len(inputs.table_rows)
        self._graph_inputs.table_rows[count:] = self._inputs.padding_row
        # What pads the step has tokens of its own; an index of an earlier, longer step may not exist in this one.
        self._graph_inputs.last[count : packed.decode_size] = packed.decode_queries * torch.arange(
            count, packed.decode_size, device=self._inputs.device
        )
        self._graphs.replay(key)

    def _call_of_graph(self, packed: PackedStep, drawn: bool) -> partial[None]:
        """The call that a graph captures: it reads and writes the same memory each time."""
        assert packed.decode_size is not None
        size = packed.decode_size
        tokens = packed.decode_size * packed.decode_queries
        following, *others = self._graph_inputs
        inputs = ModuleInputs(following[:tokens], *(values[:size] for values in others))
        return partial(self._draw, packed, self._runner.graph_normed(tokens), inputs, drawn)

    def _draw(self, packed: PackedStep, normed: Tensor, inputs: ModuleInputs, drawn: bool) -> None:
        """Draw the next drafts from the model's output `(1, tokens, hidden)`; with distributions if `drawn`."""
        step = self._inputs.resolve(packed)
        following = inputs.following
        rows = inputs.table_rows
        ends = step.query_starts[1:].long() - 1

        def next_scores(tokens: Tensor) -> Tensor:
            nonlocal normed, following
            if depth := tokens.shape[1]:
                following = following.roll(-1)
                if packed.following is not None:
                    following[ends] = packed.following[depth].long()
                following[inputs.last] = tokens[:, -1]
            normed = self._runner.predict(step, depth, normed, following)
            logits = self._runner.head(normed[:, inputs.last])
            return self._sampler.draft_scores(logits, rows) if drawn else logits

        if not drawn:
            self._tokens[rows] = likeliest_tokens(next_scores, self.longest, rows)
            return
        drafts = draft_tokens(next_scores, self.longest, *self._sampler.draws(rows), inputs.positions)
        if not self._probabilities.numel():
            self._probabilities = drafts.probabilities.new_zeros(len(self._tokens), *drafts.probabilities.shape[1:])
        self._tokens[rows] = drafts.tokens
        self._probabilities[rows] = drafts.probabilities


def _module_inputs(packed: PackedStep, checked: CheckedStep) -> ModuleInputs:
    """The first module's inputs, made on the device."""
    samples = torch.arange(len(checked.tokens), device=checked.tokens.device)
    places = samples if packed.mixed is None else packed.mixed.sampled
    places = places if packed.sampled_tokens is None else packed.sampled_tokens
    assert places is not None, "a mixed step has indices of its samples"
    last = samples
    if packed.drafts is not None and checked.accepted is not None:
        accepted = packed.drafts.samples.gather(1, checked.accepted[:, None].long())[:, 0]
        last = torch.cat((accepted.long(), samples[packed.drafts.total :]))
    if packed.mixed is None:
        assert packed.decode_size is not None
        following = samples.new_zeros(packed.decode_size * packed.decode_queries)
    else:
        assert packed.following is not None
        following = packed.mixed.tokens.roll(-1).long()
        following[packed.mixed.query_starts[1:].long() - 1] = packed.following[0].long()
    places = places.long()
    following[places] = checked.tokens.long()
    return ModuleInputs(following, places[last], checked.table_rows.long(), packed.sampled_positions[last].long() + 1)
