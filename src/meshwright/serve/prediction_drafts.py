"""A drafter that uses the model's own modules for multi-token prediction (DeepSeek-AI 2024, arXiv 2412.19437, §2.2).

After the drafts of a step are checked, the modules compute all tokens of the step, and each module draws one draft for the next step.
Their inputs stay on the device: the number of accepted drafts selects the position after which the modules draw. The layers of the modules
come after the model's layers in the cache, in the same blocks.

A module's cache entry for a position also depends on the token after this position. In two cases that token is not the request's token:

- The entry is the last one of a cached prefix: it was computed with the token that came after the prefix in another request.
- The module is not the first one: the entry may have been computed with a draft that was rejected.

Such entries change the drafts, but never the generated tokens.
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
    """Inputs of the first prediction module for a checked step, in addition to the inputs of the model.

    There is one sequence for each part of the step that got a token.
    """

    following: Tensor
    """`(tokens,)` int64: for each token of the step, the next token of its request; arbitrary where that is not known."""
    last: Tensor
    """`(sequences,)` int64: index in the step of the token whose logits gave each part's newest token.

    This is the part's last accepted draft, or the token before its first draft if no draft was accepted.
    """
    table_rows: Tensor
    """`(sequences,)` int64: table row of each part."""
    positions: Tensor
    """`(sequences,)` int64: position of the first draft for the next step: one after the newest token."""


class PredictionDrafter(SampledDrafter):
    """Draws drafts from the model's prediction modules.

    Each module draws one draft after every step, because it is not known yet whether the next step will use drafts.

    On CUDA the modules have CUDA graphs, as the model has: one for each batch size and number of tokens per decode.
    """

    def __init__(
        self, drafts: int, pauses: DraftPauses, runner: ModelRunner, inputs: BatchInputs, sampler: Sampler
    ) -> None:
        super().__init__(drafts, pauses, inputs, sampler)
        self._runner = runner
        self._tokens = torch.zeros(inputs.padding_row + 1, drafts, dtype=torch.int64, device=inputs.device)
        """`(table_rows + 1, drafts)`: the drafts for the next step of each table row."""
        self._probabilities = torch.empty(0)
        """`(table_rows + 1, drafts, vocab)`: distributions of these drafts. Empty as long as all requests are greedy."""
        self._graph_inputs = ModuleInputs(*[torch.empty(0)] * 4)
        """The memory from which the CUDA graphs read the inputs of the modules."""

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture the modules for each batch size and number of tokens per decode for which the model has a graph."""
        sizes = self._runner.decode_sizes
        shapes = [(size, 1 + self.longest) for size in drafted_sizes(sizes, self.longest)]
        shapes += [(size, 1) for size in sizes]
        # `following` has an entry for each token of a step, the other three inputs have one for each decode.
        most_tokens = max(size * queries for size, queries in shapes)
        most_decodes = max(sizes)
        lengths = (most_tokens, most_decodes, most_decodes, most_decodes)
        self._graph_inputs = ModuleInputs(
            *(torch.zeros(length, dtype=torch.int64, device=self._inputs.device) for length in lengths)
        )
        self._graph_inputs.table_rows.fill_(self._inputs.padding_row)
        for size, queries in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
            packed = self._inputs.pack_padding(size, queries)
            for drawn in (True, False):
                self._graphs.capture((size, queries, drawn), self._call_of_graph(packed, drawn))

    def follow(self, packed: PackedStep) -> None:
        """Put the drafts, which were drawn after the previous step, into a packed step."""
        drafts = packed.drafts
        self._drafts = None
        if drafts is None:
            return
        rows = drafts.table_rows.long()
        longest = drafts.tokens.shape[1]
        tokens = self._tokens[rows, :longest]
        self._place_drafts(packed, drafts, tokens)
        if not self._sampler.greedy and self._probabilities.numel():
            # The distributions of a greedy request may be older than its drafts. This does no harm: a greedy request accepts the same
            # drafts with any distribution.
            self._drafts = Drafts(tokens, self._probabilities[rows, :longest])

    def draw_next(self, packed: PackedStep, checked: CheckedStep) -> None:
        """Run the modules on the tokens of a checked step, and draw the drafts of the next step."""
        inputs = _module_inputs(packed, checked)
        drawn = not self._sampler.greedy and bool(len(checked.newest))
        # The graph cannot copy the sampling options to the device; it only reads them there.
        self._sampler.copy_options()
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
        # Padding decodes get valid indices: their own first tokens. Indices that remain from an earlier, longer step may be too large.
        self._graph_inputs.last[count : packed.decode_size] = packed.decode_queries * torch.arange(
            count, packed.decode_size, device=self._inputs.device
        )
        self._graphs.replay(key)

    def _call_of_graph(self, packed: PackedStep, drawn: bool) -> partial[None]:
        """Return the function that a graph captures. It reads its inputs from the fixed memory `_graph_inputs`.

        If `drawn`, it draws the drafts from distributions; else it takes the likeliest tokens.
        """
        assert packed.decode_size is not None
        size = packed.decode_size
        tokens = packed.decode_size * packed.decode_queries
        following, *others = self._graph_inputs
        inputs = ModuleInputs(following[:tokens], *(values[:size] for values in others))
        return partial(self._draw, packed, self._runner.graph_normed(tokens), inputs, drawn)

    def _draw(self, packed: PackedStep, normed: Tensor, inputs: ModuleInputs, drawn: bool) -> None:
        """Draw the drafts of the next step from the model's normed output `(1, tokens, hidden)`, and keep them by table row.

        If `drawn`, tokens are drawn from the distributions, which are kept too; else the likeliest tokens are taken.
        """
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
    """Make the inputs of the first module from a checked step, by operations on the device."""
    samples = torch.arange(len(checked.tokens), device=checked.tokens.device)
    # Which token of the step each sample follows.
    if packed.sampled_tokens is not None:
        places = packed.sampled_tokens
    elif packed.mixed is not None:
        assert packed.mixed.sampled is not None, "a mixed step has indices of its samples"
        places = packed.mixed.sampled
    else:
        places = samples
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
