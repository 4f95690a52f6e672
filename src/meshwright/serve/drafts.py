"""The drafters of an engine: they propose draft tokens, and check the drafts of a step that has computed them.

Some requests get no drafts: requests with penalties, with bad words of several tokens, or with a grammar. For these requests the allowed
tokens depend on all earlier tokens, and the drafts in between are not checked yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.policies.batch_request import RequestPart
from meshwright.policies.drafting import DraftPauses, most_drafting
from meshwright.serve.batch_inputs import NO_DRAFTS, BatchInputs, PackedStep, StepInputs
from meshwright.serve.graphs import Graphs
from meshwright.serve.model_runner import ModelRunner, drafted_sizes
from meshwright.serve.packed_drafts import PackedDrafts
from meshwright.serve.readback import LaunchedStep
from meshwright.serve.sampling import Sampler
from meshwright.serve.speculation import (
    Checked,
    Drafts,
    PromptLookup,
    accept_by_rejection,
    accept_equal,
    draft_tokens,
    likeliest_tokens,
)
from meshwright.spec.engine import Speculation

OwnWork = Callable[..., Any]
"""`own_work(number, function, *arguments)` calls `function` for request `number`. If it raises, only this request fails."""


class CheckedStep(NamedTuple):
    """The new tokens of a step, after the check of its drafts. All tensors are int32 on the device."""

    tokens: Tensor
    """`(samples,)`: the new token of each sample.

    A part with n accepted drafts uses the tokens of its first n + 1 samples; the tokens of its other samples are arbitrary.
    """
    accepted: Tensor | None
    """`(drafted,)`: number of accepted drafts of each part with drafts; None in a step without drafts."""
    newest: Tensor
    """`(parts,)`: the last new token of each part."""
    table_rows: Tensor
    """`(parts,)`: table row of each part."""


class Drafter:
    """Base class of the drafters. There is one subclass for each source of draft tokens.

    For each step, the engine calls `begin_step`, `propose`, `follow`, `check`, `draw_next` and `record`, in this order. It omits `propose`
    if `begin_step` returns false.
    """

    def __init__(self, longest: int, pauses: DraftPauses) -> None:
        self.longest = longest
        """Largest number of draft tokens of a request in a step."""
        self._pauses = pauses
        self.proposed = self.accepted = 0
        """Number of draft tokens that were checked so far, and number of draft tokens that were accepted."""

    def capture_graphs(self) -> None:
        """Capture the CUDA graphs of the drafter. A drafter without a model has none."""

    def begin(self, number: int) -> None:
        """Add request `number`, which may get drafts."""
        self._pauses.begin(number)

    def end(self, number: int) -> None:
        """Forget a request that has ended."""
        self._pauses.end(number)

    def begin_step(self, decodes: int) -> bool:
        """Return whether requests may get drafts in the next step. `decodes` is the number of requests that decode.

        If so, the engine completes the previous step first: a step with drafts is planned only when all earlier tokens are known.
        """
        self._pauses.next_step()
        return bool(self._pauses.drafting) and decodes <= most_drafting(self.longest)

    def propose(self, decodes: Sequence[RequestPart], own_work: OwnWork) -> Mapping[int, Sequence[int]]:
        """Return draft tokens by request number. `decodes` are the requests that decode; the host knows all their tokens."""
        return NO_DRAFTS

    def follow(self, packed: PackedStep) -> None:
        """Prepare a packed step before the main model computes it. A drafter that draws on the device puts its drafts into the step."""

    def check(self, packed: PackedStep, logits: Tensor, drawn: Tensor) -> CheckedStep:
        """Check the drafts of a step, if it has any.

        `logits` `(samples, vocab)` are the logits of the main model, `drawn` `(samples,)` the tokens drawn from them.
        """
        if packed.drafts is None:
            return CheckedStep(drawn, None, drawn, packed.sampled_rows)
        return _checked_step(packed.drafts, packed, drawn, self._accepted(packed.drafts, packed, logits, drawn))

    def _accepted(self, drafts: PackedDrafts, packed: PackedStep, logits: Tensor, drawn: Tensor) -> Checked:
        """Accept the drafts that equal the drawn tokens. So the generated tokens are the same as without drafts."""
        del packed, logits
        return accept_equal(drafts.tokens, drafts.lengths, drawn[drafts.samples])

    def draw_next(self, packed: PackedStep, checked: CheckedStep) -> None:
        """Draw the drafts of the next step, after the drafts of this step are checked. Only `PredictionDrafter` does this."""

    def record(self, launched: LaunchedStep, new: Sequence[int]) -> None:
        """Count the proposed and the accepted drafts of a step. `new` has the number of new tokens of each part.

        A part with n new tokens has n - 1 accepted drafts.
        """
        for part, count, tokens in zip(launched.parts, launched.draft_counts, new, strict=False):
            self.proposed += count - 1
            self.accepted += tokens - 1
            self._pauses.record(part.request.number, tokens - 1)


class NoDrafter(Drafter):
    """The drafter of an engine without speculative decoding."""

    def __init__(self) -> None:
        super().__init__(0, DraftPauses(0))

    def begin(self, number: int) -> None:
        """Do nothing, because no request gets drafts."""


class LookupDrafter(Drafter):
    """Proposes drafts by prompt lookup: the tokens that came after an earlier occurrence of the request's last tokens (`PromptLookup`)."""

    def __init__(self, options: Speculation, pauses: DraftPauses) -> None:
        super().__init__(options.tokens, pauses)
        self._options = options
        self._lookups: dict[int, PromptLookup] = {}

    def end(self, number: int) -> None:
        """Forget a request that has ended."""
        super().end(number)
        self._lookups.pop(number, None)

    def propose(self, decodes: Sequence[RequestPart], own_work: OwnWork) -> Mapping[int, Sequence[int]]:
        """Return draft tokens by request number. A decode without an earlier occurrence of its last tokens gets none."""
        drafts = {}
        for part in decodes:
            number = part.request.number
            if number in self._pauses.drafting:
                if proposal := own_work(number, self._look_up, part):
                    drafts[number] = proposal
                else:
                    self._pauses.record(number, 0)
        return drafts

    def _look_up(self, part: RequestPart) -> list[int]:
        """Return the draft tokens of a decode."""
        number = part.request.number
        if (lookup := self._lookups.get(number)) is None:
            lookup = PromptLookup(longest=self._options.longest, shortest=self._options.shortest)
            self._lookups[number] = lookup
        lookup.add(part.tokens[len(lookup) :])
        return lookup.propose(self.longest)


class SampledDrafter(Drafter):
    """Base class of drafters that draw drafts from a distribution on the device. Drafts are accepted by rejection sampling.

    The host does not know the drafts, so `propose` returns placeholders. `follow` replaces the placeholders by the drafts on the device.
    """

    def __init__(self, longest: int, pauses: DraftPauses, inputs: BatchInputs, sampler: Sampler) -> None:
        super().__init__(longest, pauses)
        self._inputs = inputs
        self._sampler = sampler
        self._unknown = (0,) * longest
        """The placeholders of a request's drafts."""
        self._drafts: Drafts | None = None
        """Draft tokens and their distributions in the current step. None if the step has no drafts, or if all its requests are greedy.

        Then drafts are accepted if they equal the drawn tokens.
        """
        self._graphs = Graphs()

    def propose(self, decodes: Sequence[RequestPart], own_work: OwnWork) -> Mapping[int, Sequence[int]]:
        """Return placeholders by request number, for all requests that may get drafts."""
        return dict.fromkeys(self._pauses.drafting, self._unknown)

    def _place_drafts(self, packed: PackedStep, drafts: PackedDrafts, drawn: Tensor) -> None:
        """Replace the placeholders of a packed step by the drafts `drawn` `(drafted, longest)`."""
        drafts.tokens.copy_(drawn)
        if packed.mixed is not None:
            first = packed.mixed.decodes
            tokens = torch.cat((self._inputs.newest[drafts.table_rows, None], drawn), 1)
            packed.mixed.tokens[first : first + drafts.total] = tokens.flatten()[drafts.indices].to(torch.int32)

    def _accepted(self, drafts: PackedDrafts, packed: PackedStep, logits: Tensor, drawn: Tensor) -> Checked:
        """Accept drafts by rejection sampling if they have distributions; else accept drafts that equal the drawn tokens."""
        if self._drafts is None:
            return super()._accepted(drafts, packed, logits, drawn)
        rows = packed.sampled_rows[: drafts.total]
        new = packed.sampled_positions[: drafts.total]
        scores = self._sampler.scores(logits[: drafts.total], rows, new)
        draws, seeds = self._sampler.draws(drafts.table_rows)
        positions = drafts.positions + 1
        return accept_by_rejection(self._drafts, drafts.lengths, scores[drafts.samples], draws, seeds, positions)


class ModelDrafter(SampledDrafter):
    """Draws drafts from a draft model.

    The draft model computes every step too. So its cache always has the same tokens in the same blocks as the cache of the main model.

    In a step that has only decodes, one CUDA graph draws all drafts. Each batch size has two of these graphs. The first is for steps in
    which all requests are greedy, and takes the likeliest tokens. The second draws tokens from the distributions.
    """

    def __init__(
        self, options: Speculation, pauses: DraftPauses, runner: ModelRunner, inputs: BatchInputs, sampler: Sampler
    ) -> None:
        super().__init__(options.tokens, pauses, inputs, sampler)
        self._runner = runner
        self._probabilities = torch.empty(0)
        """`(sequences, longest, vocab)`: distributions of the drafts in a step that has only decodes. The CUDA graphs write them here."""

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture the graphs of steps that have only decodes: with drafts (draw the drafts), and without (only fill the cache)."""
        sizes = self._runner.decode_sizes
        for size in reversed(drafted_sizes(sizes, self.longest)):
            self._inputs.pack_padding(size, 1 + self.longest)
            for drawn in (True, False):
                self._graphs.capture((size, drawn), partial(self._draw_decodes, size, self._inputs.blocks, drawn))
        for size in reversed(sizes):
            packed = self._inputs.pack_padding(size)
            self._graphs.capture(size, partial(self._runner.fill_cache, packed))

    def follow(self, packed: PackedStep) -> None:
        """Draw the drafts of a packed step, and write the draft model's keys and values of all tokens of the step into its cache."""
        drafts = packed.drafts
        size = packed.decode_size
        drawn = not self._sampler.greedy
        self._drafts = None
        if drafts is not None:
            # The graph cannot copy the sampling options to the device; it only reads them there.
            self._sampler.copy_options()
            if size is not None:
                self._graphs.run((size, drawn), partial(self._draw_decodes, size, packed.blocks, drawn))
                if drawn:
                    self._drafts = Drafts(drafts.tokens.long(), self._probabilities[: len(drafts.tokens)])
                return
            self._draw_beside_chunks(packed, drafts, drawn)
        self._graphs.run(size, partial(self._runner.fill_cache, packed))

    def _draw_decodes(self, size: int, blocks: int, drawn: bool) -> None:
        """Draw the drafts of a step of `size` decodes and write them into the packed step; with distributions if `drawn`."""
        rows, positions, lengths, tokens = self._inputs.drafted(size)
        drafts = self._draw(rows, positions, lengths, self.longest, blocks, drawn)
        tokens.copy_(drafts.tokens)
        if drawn:
            if len(self._probabilities) < size:
                self._probabilities = torch.empty_like(drafts.probabilities)
            self._probabilities[:size].copy_(drafts.probabilities)

    def _draw_beside_chunks(self, packed: PackedStep, drafts: PackedDrafts, drawn: bool) -> None:
        """Draw the drafts of a mixed step and write them into the packed step; with distributions if `drawn`."""
        rows = drafts.table_rows
        longest = drafts.tokens.shape[1]
        new = self._draw(rows, drafts.positions, drafts.lengths, longest, packed.blocks, drawn)
        self._place_drafts(packed, drafts, new.tokens)
        self._drafts = new if drawn else None

    def _draw(
        self, table_rows: Tensor, positions: Tensor, lengths: Tensor, longest: int, blocks: int, drawn: bool
    ) -> Drafts:
        """Draw `longest` drafts of each request, and write keys and values of the newest token and of all drafts into the cache.

        `table_rows`, `positions` and `lengths` `(sequences,)` are as in `BatchInputs.drafted`. If `drawn`, drafts are drawn from the
        distributions, which are returned too; else the likeliest tokens are taken. For a request with fewer than `longest` drafts, the
        values after its first `lengths` drafts are arbitrary.
        """

        def newest(tokens: Tensor) -> StepInputs:
            """Return the inputs of the last one of `tokens` `(sequences, drafts so far)`, or of the newest token if there are no drafts."""
            count = tokens.shape[1]
            last = tokens[:, -1].to(torch.int32) if count else self._inputs.newest[table_rows]
            # A request with fewer drafts has no cache blocks for further tokens, so these are not written.
            here = positions + lengths.clamp(max=count)
            written = lengths >= count
            return self._inputs.decodes(last, table_rows, here, written, blocks)

        def next_scores(tokens: Tensor) -> Tensor:
            logits = self._runner.forward(newest(tokens))
            return self._sampler.draft_scores(logits, table_rows) if drawn else logits

        if drawn:
            drafts = draft_tokens(next_scores, longest, *self._sampler.draws(table_rows), positions + 1)
        else:
            drafts = Drafts(likeliest_tokens(next_scores, longest, table_rows), torch.empty(0))
        self._runner.write_cache(newest(drafts.tokens))
        return drafts


def _checked_step(drafts: PackedDrafts, packed: PackedStep, drawn: Tensor, checked: Checked) -> CheckedStep:
    """Return the new tokens of a step. Parts with drafts get the tokens of `checked`; the other parts get the tokens `drawn`."""
    tokens = checked.tokens.to(torch.int32)
    others = drawn[drafts.total :]
    last = tokens.gather(1, checked.accepted[:, None])[:, 0]
    return CheckedStep(
        torch.cat((tokens.flatten()[drafts.indices], others)),
        checked.accepted.to(torch.int32),
        torch.cat((last, others)),
        torch.cat((drafts.table_rows, packed.sampled_rows[drafts.total :])),
    )
