"""Functions that change the scores of tokens before a token is drawn: penalties, biases and excluded tokens.

All functions take fp32 scores `(samples, vocab)` and return new scores. Each row has its own values of an option. With a neutral value the
row does not change, so rows with and without the option are computed in one call of fixed shape. No function waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels.likeliest import REMOVED

NEW_TOKEN = 2
"""A token's value in `token_counts` is 2 for each time that it is in the new text, plus 1 if it is in the prompt.

Example: a token that is in the prompt, and three times in the new text, has the value 7.
"""


def penalise(scores: Tensor, token_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Lower the scores of tokens that are already in the prompt or in the new text.

    `token_counts` is `(samples, vocab)`, see `NEW_TOKEN`. The penalties are `(samples,)`. Their neutral values are 1 for `repetition`, 0
    for `presence` and 0 for `frequency`. `SamplingOptions` describes them.
    """
    times = token_counts // NEW_TOKEN
    factor = torch.where(token_counts > 0, repetition[:, None], 1.0)
    scores = torch.where(scores > 0, scores / factor, scores * factor)
    return scores - frequency[:, None] * times - torch.where(times > 0, presence[:, None], 0.0)


def add_biases(scores: Tensor, tokens: Tensor, biases: Tensor) -> Tensor:
    """Add `biases` to the scores of `tokens`; both are `(samples, width)`. Rows with fewer biases are padded with token 0 and bias 0."""
    return scores.scatter_add(1, tokens, biases)


def keep_allowed(scores: Tensor, bitmask: Tensor) -> Tensor:
    """Set the scores of tokens whose bit is 0 to `REMOVED`.

    `bitmask` is `(samples, words)` int32. The bit of token t is bit t % 32 of word t // 32: token 70 has bit 6 of word 2.
    """
    vocab = scores.shape[1]
    bits = bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=scores.device) & 1
    return scores.masked_fill(bits.flatten(1)[:, :vocab] == 0, REMOVED)


def listed(tokens: Tensor, vocab: int) -> Tensor:
    """Return a mask `(samples, vocab)` that is true for the token ids in `tokens` `(samples, width)`. The id `vocab` is padding."""
    marks = torch.zeros(len(tokens), vocab + 1, dtype=torch.bool, device=tokens.device)
    return marks.scatter_(1, tokens.long(), True)[:, :vocab]


def exclude(scores: Tensor, excluded: Tensor) -> Tensor:
    """Set the scores of the tokens in the mask `excluded` `(samples, vocab)` to `REMOVED`.

    A row does not change if otherwise all its tokens would be removed.
    """
    left = scores.masked_fill(excluded, REMOVED)
    return torch.where((left > REMOVED).any(1, keepdim=True), left, scores)
