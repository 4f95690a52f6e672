"""Computes log probabilities of the prompt's tokens in a step, some tokens at a time: `(tokens, vocabulary)` is never whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.serve.batch_inputs import PackedScores
from meshwright.serve.model_runner import ModelRunner
from meshwright.serve.prompt_logprobs import PromptLogprobs
from meshwright.serve.sampling import Sampler
from meshwright.spec.exact_forward import ROWS

MOST_LOGITS = 1 << 24
"""Logits at a time at most, 64 MiB in fp32, unless `ROWS` tokens have more."""


class StepScores(NamedTuple):
    """Log probabilities of the prompts' tokens in a step."""

    counts: Sequence[tuple[int, int]]
    """Number of each request, in the order of the tokens, and how many tokens are its own."""
    values: tuple[Tensor, ...]
    """Fields of `PromptLogprobs` for all tokens, on the device or, once copied, on the host."""

    def by_request(self, most: dict[int, int]) -> list[tuple[int, PromptLogprobs]]:
        """The log probabilities of each request, with so many likeliest tokens by its number; the values are on the host."""
        found = []
        start = 0
        for number, count in self.counts:
            chosen, ranks, *top = (value[start : start + count] for value in self.values)
            columns = (chosen, ranks, *(values[:, : most[number]] for values in top))
            found.append((number, PromptLogprobs.of_bytes(*(column.numpy().tobytes() for column in columns))))
            start += count
        return found


def compute_scores(runner: ModelRunner, sampler: Sampler, scored: PackedScores, most: int) -> StepScores:
    """The log probabilities of tokens after those that `scored` names, with the `most` likeliest each.

    `runner` has just computed the step. NaN stands for a token whose logits are not finite.
    """
    vocabulary = sampler.vocab
    rows = max(MOST_LOGITS // vocabulary // ROWS, 1) * ROWS
    normed = runner.normed
    parts = []
    for indices, targets in zip(scored.indices.split(rows), scored.targets.split(rows), strict=True):
        logits = runner.head(normed[:, indices])
        chosen, top_tokens, top = sampler.logprobs(logits, targets, most)
        of_targets = logits.gather(1, targets.long()[:, None])
        ranks = 1 + (logits > of_targets).sum(1, dtype=torch.int32)
        chosen = torch.where(logits.amax(1) * 0 == 0, chosen, torch.nan)  # NaN and infinity times 0 are NaN
        parts.append((chosen, ranks, top_tokens.to(torch.int32), top))
    return StepScores(scored.counts, tuple(map(torch.cat, zip(*parts, strict=True))))
