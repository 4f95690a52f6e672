"""Log-likelihoods of given continuations, by a whole model on one device. Multiple-choice benchmarks need them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from meshwright.models.decoder import Decoder

MOST_LOGITS = 1 << 26
"""Maximum number of logits of a batch, unless a single sequence has more."""


class Score(NamedTuple):
    """Log-likelihood of a continuation in nats, and whether greedy decoding would generate it."""

    loglikelihood: float
    greedy: bool


@torch.inference_mode()
def score(model: Decoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
    """Return the score of each (context, continuation), both given as token ids. A context has at least one token.

    If both together are longer than the model's context, the beginning is left out. Sequences of similar length share a
    forward pass. They are padded at the end, where causal attention keeps the padding from changing the scores.

    Raises ValueError for an empty context, and for a continuation that alone is longer than the model's context.
    """
    texts = []
    for context, continuation in pairs:
        if not context or len(continuation) > model.spec.max_seq_len:
            raise ValueError("expected a context, and a continuation within the model's context")
        # The last token is only predicted and not read, so one token more than the context is possible.
        texts.append([*context, *continuation][-(model.spec.max_seq_len + 1) :])
    scores: list[Score | None] = [None] * len(texts)
    for batch in _batches([len(text) - 1 for text in texts], model.spec.vocab_size):
        rows = [texts[index] for index in batch]
        length = max(map(len, rows)) - 1
        inputs = torch.tensor(
            [[*row[:-1], *[0] * (length - len(row) + 1)] for row in rows], device=model.embed.weight.device
        )
        logits = model(inputs)
        for index, row, of_row in zip(batch, rows, logits, strict=True):
            count = len(pairs[index][1])
            wanted = torch.tensor(row[len(row) - count :], device=logits.device, dtype=torch.long)
            # The logits at position t predict the token at position t + 1.
            logprobs = of_row[len(row) - 1 - count : len(row) - 1].float().log_softmax(-1)
            chosen = logprobs.gather(1, wanted[:, None]).double().sum()
            scores[index] = Score(float(chosen), bool((logprobs.argmax(-1) == wanted).all()))
    return [found for found in scores if found is not None]


def _batches(lengths: Sequence[int], vocabulary: int) -> Iterator[list[int]]:
    """Yield the indices of sequences that share a forward pass, the longest first. `vocabulary` is the logits per token."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * max(1, lengths[batch[0]]) * vocabulary > MOST_LOGITS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
