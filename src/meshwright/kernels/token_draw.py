"""Random draws of tokens that depend only on (seed, position), and not on the batch, the device or earlier draws.

A token is drawn by the Gumbel-max method: the token with the largest logit after adding independent Gumbel noise has the
distribution of the softmax. The noise is a hash of seed, position and token, so that no random state is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels.likeliest import keep_likeliest

_LOW_32 = 0xFFFFFFFF
SERIES_BELOW = 1e-3
"""For v below this, -log(1 - v) is computed by its series, because 1 - v loses digits of v."""


def draw_tokens(logits: Tensor, temperatures: Tensor, top_k: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token for each row of `logits` `(rows, vocab)`. Return `(rows,)` int64.

    `top_k` `(rows,)`: only tokens that are at least as likely as the k-th likeliest are drawn; 0 allows all tokens. The
    other arguments are those of `draw_from_scores`.
    """
    neutral = torch.zeros_like(temperatures)
    scores = keep_likeliest(logits.float(), top_k, neutral + 1, neutral)
    return draw_from_scores(scores, temperatures, seeds, positions)


def draw_from_scores(
    scores: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, reference: bool = False
) -> Tensor:
    """Draw one token for each row of `scores` `(rows, vocab)`. Return `(rows,)` int64.

    A token with score -inf is never drawn. `temperatures` `(rows,)` divide the scores; temperature 0 takes the likeliest
    token. `seeds` and `positions` are `(rows,)` int64; the position is the index of the new token in its sequence.
    """
    if scores.is_cuda and not reference:
        from meshwright.kernels.token_draw_triton import draw

        return draw(scores, temperatures, seeds, positions)
    drawn = temperatures > 0
    scores = scores.float() / torch.where(drawn, temperatures, 1.0)[:, None]
    noise = gumbel_noise(seeds, positions, scores.shape[1])
    return torch.where(drawn[:, None], scores + noise, scores).argmax(1)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return Gumbel noise `(rows, vocab)` in fp32. It is a function of (seed, position) `(rows,)` and the token."""
    # All 64 bits of the seed and the low 32 bits of the position make the key of a row.
    keys = _mix(_mix(seeds & _LOW_32) ^ (seeds >> 32 & _LOW_32))
    keys = _mix(keys ^ (positions & _LOW_32))
    tokens = torch.arange(vocab, device=seeds.device)
    hashes = _mix(_mix(keys[:, None] + tokens) ^ keys[:, None])
    return gumbel_of_hash(hashes)


def gumbel_of_hash(hashes: Tensor) -> Tensor:
    """Return Gumbel noise in fp32 from uniform 32-bit integers. Small hashes give large noise, at most 23."""
    v = (hashes.float() + 0.5) * 2.0**-32
    # Noise must not be infinite, because -inf + inf would be NaN for a removed token. v may round to 1, but never to 0.
    exponential = torch.where(v < SERIES_BELOW, v * (1 + v * (0.5 + v / 3)), -torch.log(1 - v))
    return -torch.log(exponential)


def _mix(x: Tensor) -> Tensor:
    """Return MurmurHash3's 32-bit finalizer (Appleby, public domain) of the low 32 bits of int64 values."""
    x = x & _LOW_32
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _LOW_32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _LOW_32
    return x ^ (x >> 16)
