"""Batch-invariant inference: runners and samplers whose results for a request do not depend on the other requests, bit for bit.

The usual kernels of libraries do not have this property, because they choose the order of additions by the size of the batch. Here:

- On a GPU, matmuls add in a fixed order (`kernels.fixed_matmul`). The attention of each token is computed as if the token were alone: the
  number of parts into which it is divided depends only on the token's context (`serve.cached_attention`).
- On a CPU, for a usual dense model, the tokens of a step are padded to a multiple of `ROWS`. From this size on, each row has the same bits
  at any number of rows (`kernels.exact_attention`). These are also the bits of the trainer's exact forward.
- On a CPU, for other models, and if rows do not have this property, each token is computed separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.exact_attention import padded, rows_are_alike
from meshwright.kernels.loss import log_probabilities_of_logits
from meshwright.models.decoder import Decoder
from meshwright.serve.batch_inputs import StepInputs
from meshwright.serve.blocks import add_and_norm
from meshwright.serve.model_runner import ModelRunner
from meshwright.serve.sampling import Sampler, TokenLogprobs, finite, with_chosen
from meshwright.spec.engine import EngineOptions
from meshwright.spec.exact_forward import ROWS, inexact_reason


class RowRunner(ModelRunner):
    """Computes steps on a CPU with the same bits as the trainer's exact forward. For models for which `inexact_reason` is None."""

    uniform_drafts = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._step.exact = True

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits of the sampled tokens, `(samples, vocab)`."""
        x, delta = self._residual(_padded_step(inputs))
        self.normed = cast("Tensor", add_and_norm(x, delta, self._model.norm)[1])[:, : len(inputs.tokens)]
        return self.head(self.normed if inputs.sampled is None else self.normed[:, inputs.sampled])

    def head(self, normed: Tensor) -> Tensor:
        """Logits `(tokens, vocab)` of normed outputs `(1, tokens, hidden)`."""
        return super().head(padded(normed, 1, ROWS))[: normed.shape[1]]


def _padded_step(step: StepInputs) -> StepInputs:
    """Return the step with padding after its tokens, up to a multiple of `ROWS`. Padding writes nothing into the cache."""
    missing = -len(step.tokens) % ROWS
    tokens, positions = (padded(x, 0, ROWS) for x in (step.tokens, step.positions))
    return step._replace(tokens=tokens, positions=positions, slots=F.pad(step.slots, (0, missing), value=-1))


class TokenRunner(ModelRunner):
    """Computes the tokens of a step one at a time, on a CPU."""

    uniform_drafts = False

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits of the sampled tokens, `(samples, vocab)`."""
        size = self._inputs.tokens_per_block
        parent = super()
        logits = []
        normed = []
        for step in single_tokens(inputs, size):
            logits.append(parent.forward(step))
            normed.append(self.normed)
        if inputs.scored:
            self.normed = torch.cat(normed, 1)
        sampled = range(len(logits)) if inputs.sampled is None else inputs.sampled.tolist()
        return torch.cat([logits[0][:0], *(logits[index] for index in sampled)])

    def head(self, normed: Tensor) -> Tensor:
        """Return the logits `(tokens, vocab)` of the normed outputs `(1, tokens, hidden)`, computed one token at a time."""
        parent = super()
        return torch.cat([parent.head(token) for token in normed.split(1, 1)])


def single_tokens(step: StepInputs, tokens_per_block: int) -> Iterator[StepInputs]:
    """Yield a step of one token for each token of a step, in order. Only sampled tokens get logits.

    The block table of a step has only the blocks that its token reads, so that the number of columns does not depend on the batch.
    """
    starts = step.query_starts.tolist()
    positions = step.positions.tolist()
    sampled = range(len(positions)) if step.sampled is None else set(step.sampled.tolist())
    ends = torch.arange(2, dtype=torch.int32)
    for sequence, (start, stop) in enumerate(pairwise(starts)):
        for index in range(start, stop):
            token = slice(index, index + 1)
            blocks = positions[index] // tokens_per_block + 1
            yield StepInputs(
                tokens=step.tokens[token],
                positions=step.positions[token],
                slots=step.slots[:, token],
                block_tables=tuple(table[sequence : sequence + 1, :blocks] for table in step.block_tables),
                context_lengths=step.positions[token] + 1,
                query_starts=ends,
                decodes=1,
                prompts=(),
                sampled=None if index in sampled else torch.empty(0, dtype=torch.int64),
                scored=step.scored,
            )


class InvariantSampler(Sampler):
    """A sampler whose results for a row have the same bits whatever the other rows are."""

    divides_in_scores = True

    def sample(self, logits: Tensor, table_rows: Tensor, positions: Tensor, allowed: Tensor | None = None) -> Tensor:
        """See `Sampler.sample`."""
        if logits.is_cuda or not len(logits):
            return super().sample(logits, table_rows, positions, allowed)
        # On a CPU, PyTorch computes the last values of a tensor with other instructions, which round differently. So each row is computed
        # separately.
        parts = [
            super(InvariantSampler, self).sample(row, table_row, position, bits)
            for row, table_row, position, bits in zip(
                logits.split(1), table_rows.split(1), positions.split(1), _split(allowed, len(logits)), strict=True
            )
        ]
        return torch.cat(parts)

    def logprobs(self, logits: Tensor, tokens: Tensor, most: int | None = None) -> TokenLogprobs:
        """See `Sampler.logprobs`."""
        most = self.most_logprobs if most is None else most
        if logits.is_cuda:
            found = super().logprobs(logits, tokens, most)
            if not most:
                return found
            return with_chosen(found, finite(log_probabilities_of_logits(logits, tokens.long())), tokens)
        if not len(logits):
            return super().logprobs(logits, tokens, most)
        pairs = zip(logits.split(1), tokens.split(1), strict=True)
        parts = [super(InvariantSampler, self).logprobs(*pair, most) for pair in pairs]
        return TokenLogprobs(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


class RowSampler(InvariantSampler):
    """The sampler for `RowRunner`. It pads the rows of a step to a multiple of `ROWS`, and computes all rows together.

    The log probabilities of drawn tokens have the same bits as the trainer's.
    """

    def sample(self, logits: Tensor, table_rows: Tensor, positions: Tensor, allowed: Tensor | None = None) -> Tensor:
        """See `Sampler.sample`. If a request has penalties, excluded tokens or a grammar, rows are sampled one at a time."""
        count = len(logits)
        if not count or self._penalising or self._excluded or allowed is not None:
            return super().sample(logits, table_rows, positions, allowed)
        rows = torch.arange(count + -count % ROWS).clamp(max=count - 1)
        return Sampler.sample(self, logits[rows], table_rows[rows], positions[rows])[:count]

    def logprobs(self, logits: Tensor, tokens: Tensor, most: int | None = None) -> TokenLogprobs:
        """See `Sampler.logprobs`."""
        rows = padded(logits, 0, ROWS)
        targets = padded(tokens.long(), 0, ROWS)
        chosen = finite(log_probabilities_of_logits(rows, targets))
        columns = with_chosen(Sampler.logprobs(self, rows, targets, most), chosen, targets)
        return TokenLogprobs(*(column[: len(tokens)] for column in columns))


def classes_for(model: Decoder, options: EngineOptions) -> tuple[type[ModelRunner], type[Sampler]]:
    """Return the classes of the runner and of the sampler for an engine with invariant results."""
    if model.embed.weight.is_cuda:
        return ModelRunner, InvariantSampler
    weight = model.embed.weight
    usual = options.weights is None and options.kv_cache is None
    if usual and inexact_reason(model.spec) is None and rows_are_alike(model.spec.hidden, weight.dtype):
        return RowRunner, RowSampler
    return TokenRunner, InvariantSampler


def _split(allowed: Tensor | None, samples: int) -> Sequence[Tensor | None]:
    return [None] * samples if allowed is None else allowed.split(1)
