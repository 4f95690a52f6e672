"""Keeps the likeliest tokens of a distribution: top-k, top-p and min-p."""

from __future__ import annotations

import torch
from torch import Tensor

REMOVED = float("-inf")
"""Score of a token that cannot be drawn."""


def keep_likeliest(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, reference: bool = False) -> Tensor:
    """Return `scores` `(samples, vocab)` with the score of every token that top-k, top-p or min-p excludes set to -inf.

    `top_k` `(samples,)`: keep this many likeliest tokens; 0 keeps all.
    `top_p` `(samples,)`: of the tokens that top-k keeps, keep the likeliest ones whose probabilities reach this sum; 1
        keeps all.
    `min_p` `(samples,)`: keep tokens of at least this fraction of the highest probability; 0 keeps all.

    The likeliest token always stays. Tokens with equal scores all stay, or none of them. On a GPU a kernel finds the
    thresholds without sorting; with `reference` the scores are sorted there too.
    """
    if scores.is_cuda and not reference:
        from meshwright.kernels.likeliest_triton import keep

        return keep(scores, top_k, top_p, min_p)
    vocab = scores.shape[1]
    ranked = scores.sort(dim=1, descending=True).values
    ranks = torch.arange(vocab, device=scores.device)
    # Ranks from top_k on, unless their score equals that of rank top_k - 1.
    outside = (ranks >= top_k.long()[:, None]) & (top_k > 0)[:, None] & (ranked < _at(ranked, top_k))
    probabilities = ranked.masked_fill(outside, REMOVED).softmax(1)
    # The probability of all likelier tokens.
    before = probabilities.cumsum(1) - probabilities
    # Rounding may bring `before` to 1 although more tokens follow; top_p = 1 must keep them.
    allowed = ~outside & ((before < top_p[:, None]) | (top_p >= 1)[:, None])
    allowed &= probabilities >= min_p[:, None] * probabilities[:, :1]
    # The number of tokens that stay; the score of the last of them is the threshold.
    last = allowed.sum(1).clamp(min=1)
    return scores.masked_fill(scores < _at(ranked, last), REMOVED)


def _at(ranked: Tensor, count: Tensor) -> Tensor:
    """Return the `count`-th value of each row, `(rows, 1)`. `count` `(rows,)` starts at 1 and is clamped to the row."""
    return ranked.gather(1, (count.long().clamp(1, ranked.shape[1]) - 1)[:, None])
