"""Computes the log probabilities of prompt tokens in a step. It computes the logits of some tokens at a time, to save memory."""

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
"""Largest number of logits that are computed at a time: 64 MiB in fp32. But `ROWS` tokens are always computed together."""


class StepScores(NamedTuple):
    """Log probabilities of the prompt tokens of a step."""

    counts: Sequence[tuple[int, int]]
    """`(request number, number of its tokens)` pairs, in the order of the tokens."""
    values: tuple[Tensor, ...]
    """The fields of `PromptLogprobs` for all tokens; on the device first, and on the host after the copy."""

    def by_request(self, most: dict[int, int]) -> list[tuple[int, PromptLogprobs]]:
        """Return `(request number, log probabilities)` of each request. The values must be on the host.

        `most` has, by request number, how many of the likeliest tokens each request gets.
        """
        found = []
        start = 0
        for number, count in self.counts:
            chosen, ranks, *top = (value[start : start + count] for value in self.values)
            columns = (chosen, ranks, *(values[:, : most[number]] for values in top))
            found.append((number, PromptLogprobs.of_bytes(*(column.numpy().tobytes() for column in columns))))
            start += count
        return found


def compute_scores(runner: ModelRunner, sampler: Sampler, scored: PackedScores, most: int) -> StepScores:
    """Compute the log probabilities of the tokens `scored.targets`, and of the `most` likeliest tokens at their positions.

    `runner` must have computed the step just before. If the logits at a position are not finite, the log probability is NaN.
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
        # NaN · 0 and ±infinity · 0 are NaN, which does not equal 0.
        chosen = torch.where(logits.amax(1) * 0 == 0, chosen, torch.nan)
        parts.append((chosen, ranks, top_tokens.to(torch.int32), top))
    return StepScores(scored.counts, tuple(map(torch.cat, zip(*parts, strict=True))))
