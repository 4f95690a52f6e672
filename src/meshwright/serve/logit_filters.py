"""Changes to logits before a token is drawn, each for a batch of rows with values of their own.

All functions take scores `(samples, vocab)` in fp32 and return new ones. Neutral values leave a row as it is, so rows with and
without an option share one call of fixed shape. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

REMOVED = float("-inf")
"""Score of a token that is not drawn."""
NEW_TOKEN = 2
"""What `token_counts` has for each time that a token is in the new text; 1 more if it is in the prompt."""


def penalise(scores: Tensor, token_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Lower the scores of tokens that the text has.

    `token_counts` `(samples, vocab)`: `NEW_TOKEN` for each time in the new text, plus 1 for tokens of the prompt. The penalties are
    `(samples,)`; neutral are 1, 0 and 0.
    """
    times = token_counts // NEW_TOKEN
    factor = torch.where(token_counts > 0, repetition[:, None], 1.0)
    scores = torch.where(scores > 0, scores / factor, scores * factor)
    return scores - frequency[:, None] * times - torch.where(times > 0, presence[:, None], 0.0)


def add_biases(scores: Tensor, tokens: Tensor, biases: Tensor) -> Tensor:
    """Add biases `(samples, width)` to the scores of tokens `(samples, width)`; padding is token 0 with bias 0."""
    return scores.scatter_add(1, tokens, biases)


def keep_allowed(scores: Tensor, bitmask: Tensor) -> Tensor:
    """Remove tokens whose bit is 0: for token t, bit t % 32 of word t // 32 of `bitmask` `(samples, words)` int32."""
    vocab = scores.shape[1]
    bits = bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=scores.device) & 1
    return scores.masked_fill(bits.flatten(1)[:, :vocab] == 0, REMOVED)


def keep_likeliest(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Remove all but the likeliest tokens by top-k, then by top-p among the others, and by min-p; each is `(samples,)`.

    Neutral are 0, 1 and 0. The likeliest token always stays, and of equal scores all stay or none.
    """
    vocab = scores.shape[1]
    ranked = scores.sort(dim=1, descending=True).values
    ranks = torch.arange(vocab, device=scores.device)
    outside = (ranks >= top_k.long()[:, None]) & (top_k > 0)[:, None] & (ranked < _at(ranked, top_k))
    probabilities = ranked.masked_fill(outside, REMOVED).softmax(1)
    before = probabilities.cumsum(1) - probabilities
    # Rounding may bring `before` to 1 although tokens follow.
    kept = ~outside & ((before < top_p[:, None]) | (top_p >= 1)[:, None])
    kept &= probabilities >= min_p[:, None] * probabilities[:, :1]
    last = kept.sum(1).clamp(min=1)
    return scores.masked_fill(scores < _at(ranked, last), REMOVED)


def _at(ranked: Tensor, count: Tensor) -> Tensor:
    """The `count`-th value of each row, `(rows, 1)`; `count` `(rows,)` from 1, others go to the nearest."""
    return ranked.gather(1, (count.long().clamp(1, ranked.shape[1]) - 1)[:, None])
