"""Random draws of tokens that depend on (seed, position) alone: not on the batch, the device or earlier draws.

A token is drawn by the Gumbel-max method: the largest logit after adding independent Gumbel noise has the distribution of the softmax.
The noise is a hash of seed, position and token, so there is no random state to keep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels.likeliest import keep_likeliest

_LOW_32 = 0xFFFFFFFF
SERIES_BELOW = 1e-3
"""Below it, -log(1 - v) is computed by its series, since 1 - v loses the digits of v."""


def draw_tokens(logits: Tensor, temperatures: Tensor, top_k: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a token for each row of logits `(rows, vocab)`, as `(rows,)` int64.

    `top_k` `(rows,)`: only tokens as likely as the k-th likeliest are drawn; 0 allows all. The other arguments are those of
    `draw_from_scores`.
    """
    neutral = torch.zeros_like(temperatures)
    scores = keep_likeliest(logits.float(), top_k, neutral + 1, neutral)
    return draw_from_scores(scores, temperatures, seeds, positions)


def draw_from_scores(
    scores: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, plain: bool = False
) -> Tensor:
    """Draw a token for each row of scores `(rows, vocab)`, as `(rows,)` int64; never one whose score is -inf.

    `temperatures` `(rows,)` divide the scores; 0 takes the likeliest token. `seeds` and `positions` `(rows,)` int64: the position is
    that of the new token in its text.
    """
    if scores.is_cuda and not plain:
        from meshwright.kernels.token_draw_triton import draw

        return draw(scores, temperatures, seeds, positions)
    drawn = temperatures > 0
    scores = scores.float() / torch.where(drawn, temperatures, 1.0)[:, None]
    noise = gumbel_noise(seeds, positions, scores.shape[1])
    return torch.where(drawn[:, None], scores + noise, scores).argmax(1)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise `(rows, vocab)` in fp32, a function of each row's seed and position and the token."""
    keys = _mix(_mix(seeds & _LOW_32) ^ (seeds >> 32 & _LOW_32))
    keys = _mix(keys ^ (positions & _LOW_32))
    tokens = torch.arange(vocab, device=seeds.device)
    hashes = _mix(_mix(keys[:, None] + tokens) ^ keys[:, None])
    return gumbel_of_hash(hashes)


def gumbel_of_hash(hashes: Tensor) -> Tensor:
    """Gumbel noise in fp32 from uniform integers of 32 bits; the smallest give the largest noise, at most 23."""
    v = (hashes.float() + 0.5) * 2.0**-32
    # A token that is removed has score -inf, so noise must not be inf: v may round to 1, but not to 0.
    exponential = torch.where(v < SERIES_BELOW, v * (1 + v * (0.5 + v / 3)), -torch.log(1 - v))
    return -torch.log(exponential)


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer (Appleby, public domain) of the low 32 bits of int64 values."""
    x = x & _LOW_32
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _LOW_32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _LOW_32
    return x ^ (x >> 16)
