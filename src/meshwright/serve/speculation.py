"""Speculative decoding: a cheap method proposes draft tokens, and the model checks all of them in one step.

There are two ways to check drafts. Neither changes the distribution of the text:

- `accept_equal` accepts a draft if the model draws the same token at its position. A draw depends on seed and position only, so even the
  text is the same as without drafts. If a draft has no distribution, as in prompt lookup, no method accepts more.
- `accept_by_rejection` is the rejection sampling of Leviathan et al. (arXiv 2211.17192). It accepts more tokens of a draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.token_draw import gumbel_noise

# XOR with these makes three seeds of a request's seed, so that the draws of drafts and of their check are independent.
_DRAFT = 0x2545F4914F6CDD1D
_ACCEPT = 0x61C8864680B583EB
_REPLACE = 0x1F83D9ABFB41BD6B


class PromptLookup:
    """Proposes the tokens that followed an earlier occurrence of a text's last tokens. Memory and time are linear.

    It looks for the last `longest` tokens, then for fewer, down to `shortest`; of several occurrences it takes the last. Example: after
    "a b c d a b" it finds "a b" and proposes "c d".
    """

    def __init__(self, tokens: Iterable[int] = (), *, longest: int = 4, shortest: int = 2) -> None:
        self._tokens: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        """For each run of tokens: the position after its last occurrence, the one at the end of the text not counted."""
        self.add(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text = self._tokens
        for token in tokens:
            end = len(text)
            self._after.update({tuple(text[end - length :]): end for length in self._lengths if length <= end})
            text.append(token)

    def propose(self, count: int) -> list[int]:
        """At most `count` draft tokens; none if the last tokens are new to the text."""
        text = self._tokens
        end = len(self._tokens)
        runs = (tuple(text[end - length :]) for length in self._lengths if length <= end)
        start = next((self._after[run] for run in runs if run in self._after), None)
        drafts: list[int] = []
        if start is None:
            return drafts
        for position in range(start, start + count):
            # If the proposal reaches the end of the text, it goes on with its own tokens: the run is taken to repeat.
            drafts.append(text[position] if position < end else drafts[position - end])
        return drafts


class Drafts(NamedTuple):
    """Draft tokens of a batch, and the distributions that they were drawn from."""

    tokens: Tensor
    """`(sequences, drafts)` int64."""
    probabilities: Tensor
    """`(sequences, drafts, vocab)` fp32."""


class Checked(NamedTuple):
    """The outcome of a check."""

    tokens: Tensor
    """`(sequences, drafts + 1)` int64: the accepted drafts and one more token; then arbitrary ones."""
    accepted: Tensor
    """`(sequences,)` int64: number of accepted drafts."""


def draft_tokens(
    next_scores: Callable[[Tensor], Tensor], count: int, draws: Tensor, seeds: Tensor, positions: Tensor
) -> Drafts:
    """`count` draft tokens for each sequence, by a draft model.

    `next_scores` returns the model's scores `(sequences, vocab)` after the drafts so far, whose shape is `(sequences, 0)` at first and
    `(sequences, count - 1)` at last. For each sequence, `(sequences,)`: `draws` says whether it draws its tokens or takes the likeliest,
    `seeds` is its seed, `positions` the position of its first draft.
    """
    tokens = torch.empty(len(seeds), 0, dtype=torch.int64, device=seeds.device)
    distributions = []
    for index in range(count):
        probabilities = _probabilities(next_scores(tokens), draws)
        drawn = _draw(probabilities, seeds ^ _DRAFT, positions + index)
        tokens = torch.cat((tokens, drawn[:, None]), 1)
        distributions.append(probabilities)
    return Drafts(tokens, torch.stack(distributions, 1))


def likeliest_tokens(next_scores: Callable[[Tensor], Tensor], count: int, like: Tensor) -> Tensor:
    """The likeliest `count` draft tokens of each sequence, `(sequences, count)` int64.

    `next_scores` is that of `draft_tokens`; `like` is any tensor `(sequences, …)` on the device.
    """
    tokens = like.new_empty(len(like), 0, dtype=torch.int64)
    for _ in range(count):
        tokens = torch.cat((tokens, next_scores(tokens).argmax(1, keepdim=True)), 1)
    return tokens


def accept_equal(drafts: Tensor, lengths: Tensor, drawn: Tensor) -> Checked:
    """Accept the leading drafts `(sequences, drafts)` that equal the tokens drawn by the model.

    `drawn` `(sequences, drafts + 1)` are the tokens that it draws after the text and after each draft. `lengths` `(sequences,)` are the
    numbers of drafts.
    """
    equal = drafts == drawn[:, :-1]
    return Checked(drawn, _leading(equal, lengths))


def accept_by_rejection(
    drafts: Drafts, lengths: Tensor, scores: Tensor, draws: Tensor, seeds: Tensor, positions: Tensor
) -> Checked:
    """Accept each draft with the probability min(1, p / q), then draw one more token; sequences keep the distribution
    p.

    p is the softmax of the model's `scores` `(sequences, drafts + 1, vocab)` after the text and after each draft; q is the distribution
    of the draft. `lengths` `(sequences,)` are numbers of drafts; the other arguments are those of `draft_tokens`.
    """
    count = drafts.tokens.shape[1]
    target = _probabilities(scores, draws)
    p = target[:, :count].gather(2, drafts.tokens[:, :, None])[:, :, 0]
    q = drafts.probabilities.gather(2, drafts.tokens[:, :, None])[:, :, 0]
    places = positions[:, None] + torch.arange(count, device=positions.device)
    noise = gumbel_noise((seeds ^ _ACCEPT).repeat_interleave(count), places.flatten(), 1).view_as(p)
    uniform = torch.exp(-torch.exp(-noise))
    accepted = _leading(uniform * q < p, lengths)

    vocab = target.shape[2]
    here = accepted[:, None, None].expand(-1, 1, vocab)
    p_here = target.gather(1, here)[:, 0]
    q_here = torch.zeros_like(p_here)
    if count:
        rejected = (accepted < lengths)[:, None]
        q_here = torch.where(rejected, drafts.probabilities.gather(1, here.clamp(max=count - 1))[:, 0], 0.0)
    excess = (p_here - q_here).clamp(min=0)
    # Rounding may leave nothing where the two distributions are almost equal.
    excess = torch.where(excess.sum(1, keepdim=True) > 0, excess, p_here)
    last = _draw(excess, seeds ^ _REPLACE, positions + accepted)
    tokens = torch.cat((drafts.tokens, last[:, None]), 1)
    return Checked(tokens.scatter(1, accepted[:, None], last[:, None]), accepted)


def _probabilities(scores: Tensor, draws: Tensor) -> Tensor:
    """The softmax of scores `(sequences, …, vocab)`, or 1 for the likeliest token in sequences that do not draw."""
    likeliest = torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    return torch.where(draws.view(-1, *[1] * (scores.ndim - 1)), scores.softmax(-1), likeliest)


def _draw(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Tokens `(sequences,)` drawn in proportion to weights `(sequences, vocab)`."""
    return (weights.log() + gumbel_noise(seeds, positions, weights.shape[1])).argmax(1)


def _leading(accepted: Tensor, lengths: Tensor) -> Tensor:
    """For each row of `accepted` `(sequences, drafts)`: how many of its first `lengths` values are true before the first that is not."""
    within = torch.arange(accepted.shape[1], device=accepted.device) < lengths[:, None]
    return (accepted & within).long().cumprod(1).sum(1)
