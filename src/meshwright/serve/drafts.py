"""Draft tokens of an engine's requests: who proposes them, and the check of a step that has computed them.

Requests with penalties or a grammar get no drafts: their logits depend on all tokens before, those of drafts included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.policies.batch_request import Part
from meshwright.serve.batch_inputs import NO_DRAFTS, BatchInputs, Packed, PackedDrafts
from meshwright.serve.kv_cache import KVCache, layer_groups
from meshwright.serve.model_runner import ModelRunner
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
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec


class CheckedStep(NamedTuple):
    """The tokens of a step with drafts, int32 on the device."""

    tokens: Tensor
    """`(samples,)`; of the samples of a part with drafts, those of the accepted drafts and the next one count."""
    accepted: Tensor
    """`(drafted,)`: numbers of accepted drafts."""
    newest: Tensor
    """`(parts,)`: the newest token of each part."""
    table_rows: Tensor
    """`(parts,)`: the table rows of the parts."""


class Drafter:
    """What an engine asks for drafts; the source of proposals is that of a subclass."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        """Draft tokens of a request in a step at most."""
        self.proposed = self.accepted = 0
        """Draft tokens that were checked and accepted so far."""
        self._requests: set[int] = set()

    @property
    def active(self) -> bool:
        """Whether an unfinished request may get drafts. Then a step is planned when all tokens of the one before are known."""
        return bool(self._requests)

    def begin(self, number: int) -> None:
        """Note a request that may get drafts."""
        self._requests.add(number)

    def end(self, number: int) -> None:
        """Forget a request that has ended."""
        self._requests.discard(number)

    def propose(self, decodes: Sequence[Part]) -> Mapping[int, Sequence[int]]:
        """Draft tokens by request number, for decodes of which all tokens are known."""
        return NO_DRAFTS

    def follow(self, packed: Packed) -> None:
        """Compute what a draft model needs of a step, before the model computes it."""

    def check(self, packed: Packed, logits: Tensor, drawn: Tensor) -> CheckedStep:
        """Check the drafts of a step by its logits `(samples, vocab)` and the tokens `(samples,)` drawn from them.

        Accepts drafts that equal the drawn tokens, so texts are those without drafts.
        """
        drafts, tokens = _parts_of(packed)
        index = _samples_of(drafts)
        return _checked_step(packed, drawn, accept_equal(tokens[index[:, 1:]], drafts.lengths, drawn[index]))


class NoDrafter(Drafter):
    """The drafter of an engine without speculative decoding."""

    def __init__(self) -> None:
        super().__init__(0)

    def begin(self, number: int) -> None:
        """Ignore a request: none gets drafts."""


class LookupDrafter(Drafter):
    """Drafts are what followed a text's last tokens where they came before."""

    def __init__(self, options: Speculation) -> None:
        super().__init__(options.tokens)
        self._options = options
        self._lookups: dict[int, PromptLookup] = {}

    def end(self, number: int) -> None:
        """Forget a request that has ended."""
        super().end(number)
        self._lookups.pop(number, None)

    def propose(self, decodes: Sequence[Part]) -> Mapping[int, Sequence[int]]:
        """Draft tokens by request number, for decodes of which all tokens are known."""
        drafts = {}
        for part in decodes:
            number = part.request.number
            if number in self._requests:
                if (lookup := self._lookups.get(number)) is None:
                    lookup = PromptLookup(longest=self._options.longest, shortest=self._options.shortest)
                    self._lookups[number] = lookup
                lookup.add(part.tokens[len(lookup) :])
                if proposal := lookup.propose(self.longest):
                    drafts[number] = proposal
        return drafts


class ModelDrafter(Drafter):
    """Drafts are drawn from a draft model, and accepted by rejection sampling.

    The draft model computes every step too, so its cache has the same tokens in the same blocks as the model's.
    """

    def __init__(self, options: Speculation, runner: ModelRunner, inputs: BatchInputs, sampler: Sampler) -> None:
        super().__init__(options.tokens)
        self._runner, self._inputs, self._sampler = runner, inputs, sampler
        self._unknown = (0,) * options.tokens
        """Drafts that are not known when the step is planned; `follow` puts the drawn ones in their place on the device."""
        self._drafts: Drafts | None = None
        """Those of the current step, with their distributions; None if all requests take the likeliest tokens."""

    def propose(self, decodes: Sequence[Part]) -> Mapping[int, Sequence[int]]:
        """Placeholders for draft tokens by request number."""
        return dict.fromkeys(self._requests, self._unknown)

    def follow(self, packed: Packed) -> None:
        """Draw the drafts of a packed step, and write the draft model's keys and values of its tokens."""
        if packed.drafts is not None:
            drafts, tokens = _parts_of(packed)
            drafted = self._draw(drafts, packed.blocks)
            sequence, offset = _places_of(drafts)
            newest = self._inputs.newest[drafts.table_rows, None]
            tokens.copy_(torch.cat((newest, drafted), 1)[sequence, offset])
        self._runner.fill_cache(packed)

    def check(self, packed: Packed, logits: Tensor, drawn: Tensor) -> CheckedStep:
        """Check the drafts of a step by rejection sampling; requests without drafts keep the `drawn` tokens."""
        if self._drafts is None:
            return super().check(packed, logits, drawn)
        drafts, _ = _parts_of(packed)
        scores = self._sampler.scores(logits[: drafts.samples], packed.sampled_rows[: drafts.samples])
        draws, seeds = self._sampler.draws(drafts.table_rows)
        scores, positions = scores[_samples_of(drafts)], drafts.positions + 1
        checked = accept_by_rejection(self._drafts, drafts.lengths, scores, draws, seeds, positions)
        return _checked_step(packed, drawn, checked)

    def _draw(self, drafts: PackedDrafts, blocks: int) -> Tensor:
        """Draft tokens `(drafted, longest)`; those beyond the `lengths` of `drafts` are arbitrary."""
        rows = drafts.table_rows

        def next_scores(tokens: Tensor) -> Tensor:
            count = tokens.shape[1]
            newest = tokens[:, -1].to(torch.int32) if count else self._inputs.newest[rows]
            # Where a request has fewer drafts, its last position is computed again: it has no blocks for more.
            positions = drafts.positions + (drafts.lengths - 1).clamp(max=count)
            logits = self._runner.forward(self._inputs.decodes(newest, rows, positions, blocks))
            return logits if self._sampler.greedy else self._sampler.scores(logits, rows)

        self._drafts = None
        if self._sampler.greedy:
            return likeliest_tokens(next_scores, drafts.longest, rows)
        draws, seeds = self._sampler.draws(rows)
        self._drafts = draft_tokens(next_scores, drafts.longest, draws, seeds, drafts.positions + 1)
        return self._drafts.tokens


def drafter_for(
    options: Speculation | None,
    draft_model: Decoder | None,
    spec: ModelSpec,
    inputs: BatchInputs,
    sampler: Sampler,
    *,
    blocks: int,
    context: int,
) -> Drafter:
    """The drafter of an engine for a model of `spec`.

    A draft model's cache has as many `blocks` in each group as the model's.
    """
    if options is None:
        return NoDrafter()
    if draft_model is None:
        return LookupDrafter(options)
    check_draft_model(draft_model.spec, spec, context)
    weight = draft_model.embed.weight
    cache = KVCache(
        draft_model.spec,
        [blocks] * inputs.groups,
        tokens_per_block=inputs.tokens_per_block,
        device=weight.device,
        dtype=weight.dtype,
    )
    runner = ModelRunner(draft_model, cache, inputs, context=context)
    return ModelDrafter(options, runner, inputs, sampler)


def check_draft_model(draft: ModelSpec, spec: ModelSpec, context: int) -> None:
    """Raise BadInput if a model cannot be the draft model of another in texts of up to `context` tokens."""
    if draft.vocab_size != spec.vocab_size:
        raise BadInput(
            f"draft model: expected the model's vocabulary of {spec.vocab_size} tokens, got {draft.vocab_size}; "
            "choose a model with the same tokenizer"
        )
    if draft.max_seq_len < context:
        raise BadInput(
            f"draft model: its context of {draft.max_seq_len} tokens is shorter than the engine's of {context}; "
            f"give the engine a context of {draft.max_seq_len}"
        )
    for ours, theirs in zip(layer_groups(draft), layer_groups(spec), strict=True):
        if theirs.window is not None and (ours.window is None or ours.window > theirs.window):
            raise BadInput(
                f"draft model: it attends to {ours.window or 'all'} tokens, but only {theirs.window} stay in the cache; "
                "choose a model with this window or a smaller one"
            )


def _parts_of(packed: Packed) -> tuple[PackedDrafts, Tensor]:
    """The drafts of a packed step, and the tokens `(samples,)` of the parts with drafts, as a view."""
    drafts, mixed = packed.drafts, packed.mixed
    assert drafts is not None and mixed is not None
    return drafts, mixed.tokens[drafts.first : drafts.first + drafts.samples]


def _samples_of(drafts: PackedDrafts) -> Tensor:
    """`(drafted, longest + 1)` int64: the samples of each part with drafts; the last again where a part has fewer."""
    sizes = drafts.lengths.long() + 1
    columns = torch.arange(drafts.longest + 1, device=sizes.device)
    return (sizes.cumsum(0) - sizes)[:, None] + torch.minimum(columns, sizes[:, None] - 1)


def _places_of(drafts: PackedDrafts) -> tuple[Tensor, Tensor]:
    """For each sample of the parts with drafts, `(samples,)` int64: its part, and its place in the part."""
    sizes = drafts.lengths.long() + 1
    part = torch.repeat_interleave(sizes, output_size=drafts.samples)
    return part, torch.arange(drafts.samples, device=sizes.device) - (sizes.cumsum(0) - sizes)[part]


def _checked_step(packed: Packed, drawn: Tensor, checked: Checked) -> CheckedStep:
    """The outcome for all parts of a step, from that for the parts with drafts; the others keep their `drawn` tokens."""
    drafts, _ = _parts_of(packed)
    tokens, others = checked.tokens.to(torch.int32), drawn[drafts.samples :]
    last = tokens.gather(1, checked.accepted[:, None])[:, 0]
    return CheckedStep(
        torch.cat((tokens[_places_of(drafts)], others)),
        checked.accepted.to(torch.int32),
        torch.cat((last, others)),
        torch.cat((drafts.table_rows, packed.sampled_rows[drafts.samples :])),
    )
