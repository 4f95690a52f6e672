"""Changes to logits before a token is drawn, each for a batch of rows with values of their own.

All functions take scores `(samples, vocab)` in fp32 and return new ones. Neutral values leave a row as it is, so rows with and
without an option share one call of fixed shape. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels.likeliest import REMOVED

NEW_TOKEN = 2
"""Amount in `token_counts` for each time that a token is in the new text; 1 more if it is in the prompt."""


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


def listed(tokens: Tensor, vocab: int) -> Tensor:
    """A mask `(samples, vocab)` of the token ids in `tokens` `(samples, width)`; the id `vocab` stands for none."""
    marks = torch.zeros(len(tokens), vocab + 1, dtype=torch.bool, device=tokens.device)
    return marks.scatter_(1, tokens.long(), True)[:, :vocab]


def exclude(scores: Tensor, excluded: Tensor) -> Tensor:
    """Remove the tokens of a mask `(samples, vocab)`; a row that would lose all its tokens stays as it is."""
    left = scores.masked_fill(excluded, REMOVED)
    return torch.where((left > REMOVED).any(1, keepdim=True), left, scores)
