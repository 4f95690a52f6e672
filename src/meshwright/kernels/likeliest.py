"""The likeliest tokens of scores: top-k, top-p and min-p."""

from __future__ import annotations

import torch
from torch import Tensor

REMOVED = float("-inf")
"""Score of a token that is not drawn."""


def keep_likeliest(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, plain: bool = False) -> Tensor:
    """Remove all but the likeliest tokens of scores `(samples, vocab)` by top-k, then top-p among the others, and by min-p.

    The options are `(samples,)`; neutral are 0, 1 and 0. The likeliest token always stays, and of equal scores all stay or none. On a
    GPU a kernel finds the thresholds without sorting; `plain` sorts there too.
    """
    if scores.is_cuda and not plain:
        from meshwright.kernels.likeliest_triton import keep

        return keep(scores, top_k, top_p, min_p)
    vocab = scores.shape[1]
    ranked = scores.sort(dim=1, descending=True).values
    ranks = torch.arange(vocab, device=scores.device)
    outside = (ranks >= top_k.long()[:, None]) & (top_k > 0)[:, None] & (ranked < _at(ranked, top_k))
    probabilities = ranked.masked_fill(outside, REMOVED).softmax(1)
    before = probabilities.cumsum(1) - probabilities
    # Rounding may bring `before` to 1 although tokens follow.
    allowed = ~outside & ((before < top_p[:, None]) | (top_p >= 1)[:, None])
    allowed &= probabilities >= min_p[:, None] * probabilities[:, :1]
    last = allowed.sum(1).clamp(min=1)
    return scores.masked_fill(scores < _at(ranked, last), REMOVED)


def _at(ranked: Tensor, count: Tensor) -> Tensor:
    """The `count`-th value of each row, `(rows, 1)`; `count` `(rows,)` from 1, others go to the nearest."""
    return ranked.gather(1, (count.long().clamp(1, ranked.shape[1]) - 1)[:, None])
