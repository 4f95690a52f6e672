"""Speculative decoding: a cheap method proposes draft tokens, and the model checks all of them in one step.

There are two methods to check drafts. Neither changes the distribution of the generated tokens:

- `accept_equal` accepts a draft if the model draws the same token at its position. The noise of a draw depends on seed and position only,
  so even the generated tokens are the same as without drafts. For drafts without a distribution, as in prompt lookup, no method accepts
  more drafts.
- `accept_by_rejection` is the rejection sampling of Leviathan et al. (arXiv 2211.17192). It accepts more drafts of a draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.token_draw import gumbel_noise

# XOR with these constants makes three more seeds from a request's seed: to draw drafts, to accept them, and to draw a token that replaces a
# rejected draft. So these draws are independent.
_DRAFT = 0x2545F4914F6CDD1D
_ACCEPT = 0x61C8864680B583EB
_REPLACE = 0x1F83D9ABFB41BD6B


class PromptLookup:
    """Proposes the tokens that came after an earlier occurrence of a request's last tokens.

    It looks for an earlier occurrence of the last `longest` tokens. If there is none, it looks for the last `longest` - 1 tokens, and so on
    down to `shortest`. If there are several occurrences, it uses the last. Example: after "a b c d a b" it finds "a b" and proposes "c d".

    Memory and time are linear in the number of tokens.
    """

    def __init__(self, tokens: Iterable[int] = (), *, longest: int = 4, shortest: int = 2) -> None:
        self._tokens: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        """Maps each sequence of `shortest` to `longest` tokens in the text to the position after its last occurrence.

        An occurrence at the end of the text does not count, because no token follows it.
        """
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
        """Return `count` draft tokens, or none if the last tokens have no earlier occurrence."""
        text = self._tokens
        end = len(self._tokens)
        runs = (tuple(text[end - length :]) for length in self._lengths if length <= end)
        start = next((self._after[run] for run in runs if run in self._after), None)
        drafts: list[int] = []
        if start is None:
            return drafts
        for position in range(start, start + count):
            # After the end of the text, the draft repeats itself. Example: "a b a b" with 5 drafts gives "a b a b a".
            drafts.append(text[position] if position < end else drafts[position - end])
        return drafts


class Drafts(NamedTuple):
    """Draft tokens of a batch, and the distributions from which they were drawn."""

    tokens: Tensor
    """`(sequences, drafts)` int64: the draft tokens."""
    probabilities: Tensor
    """`(sequences, drafts, vocab)` fp32: the distribution of each draft token."""


class Checked(NamedTuple):
    """The new tokens of a batch after the check of its drafts."""

    tokens: Tensor
    """`(sequences, drafts + 1)` int64: the accepted drafts of a sequence, then one more token; the values after these are arbitrary."""
    accepted: Tensor
    """`(sequences,)` int64: number of accepted drafts of each sequence."""


def draft_tokens(
    next_scores: Callable[[Tensor], Tensor], count: int, draws: Tensor, seeds: Tensor, positions: Tensor
) -> Drafts:
    """Draw `count` draft tokens for each sequence with a draft model.

    - `next_scores`: called `count` times with the drafts so far: `(sequences, 0)` in the first call, `(sequences, count - 1)` in the last.
      It returns the scores of the next token, `(sequences, vocab)`.
    - `draws`: `(sequences,)` bool: whether a sequence draws its tokens. If not, it takes the likeliest token.
    - `seeds`: `(sequences,)`: seed of each sequence.
    - `positions`: `(sequences,)`: position of the first draft of each sequence.
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
    """Return `count` draft tokens for each sequence, each the likeliest next token. `(sequences, count)` int64.

    `next_scores` is as in `draft_tokens`. `like` is any tensor `(sequences, …)`; it gives the number of sequences and the device.
    """
    tokens = like.new_empty(len(like), 0, dtype=torch.int64)
    for _ in range(count):
        tokens = torch.cat((tokens, next_scores(tokens).argmax(1, keepdim=True)), 1)
    return tokens


def accept_equal(drafts: Tensor, lengths: Tensor, drawn: Tensor) -> Checked:
    """Accept the drafts of each sequence up to the first draft that differs from the token that the model draws at its position.

    - `drafts`: `(sequences, drafts)`.
    - `lengths`: `(sequences,)`: number of drafts of each sequence.
    - `drawn`: `(sequences, drafts + 1)`: the tokens that the model draws after the newest token and after each draft.

    Example: drafts 7, 8, 9 and drawn tokens 7, 8, 5, 6 give 2 accepted drafts; the new tokens are 7, 8, 5.
    """
    equal = drafts == drawn[:, :-1]
    return Checked(drawn, _leading(equal, lengths))


def accept_by_rejection(
    drafts: Drafts, lengths: Tensor, scores: Tensor, draws: Tensor, seeds: Tensor, positions: Tensor
) -> Checked:
    """Accept each draft with the probability min(1, p / q) until one is rejected, then draw one more token.

    p is the probability of the draft by the model's distribution, q its probability by the drafter's distribution. If a draft is rejected,
    the last token is drawn in proportion to max(0, p - q); else it is drawn from the model's distribution. So the new tokens have the
    model's distribution.

    - `drafts`: the drafts, with the drafter's distributions.
    - `lengths`: `(sequences,)`: number of drafts of each sequence.
    - `scores`: `(sequences, drafts + 1, vocab)`: scores of the model after the newest token and after each draft. The model's distribution
      is their softmax.
    - `draws`: `(sequences,)` bool: whether a sequence draws its tokens. If not, it takes the likeliest token.
    - `seeds`, `positions`: `(sequences,)`: the seed of each sequence, and the position of its first draft.
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
    # If the two distributions are almost equal, all values may be 0 after rounding. Then the token is drawn from the model's distribution.
    excess = torch.where(excess.sum(1, keepdim=True) > 0, excess, p_here)
    last = _draw(excess, seeds ^ _REPLACE, positions + accepted)
    tokens = torch.cat((drafts.tokens, last[:, None]), 1)
    return Checked(tokens.scatter(1, accepted[:, None], last[:, None]), accepted)


def _probabilities(scores: Tensor, draws: Tensor) -> Tensor:
    """Return the softmax of scores `(sequences, …, vocab)`. A sequence that does not draw gets 1 for its likeliest token and else 0."""
    likeliest = torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    return torch.where(draws.view(-1, *[1] * (scores.ndim - 1)), scores.softmax(-1), likeliest)


def _draw(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a token for each sequence, in proportion to `weights` `(sequences, vocab)`. Returns `(sequences,)`."""
    return (weights.log() + gumbel_noise(seeds, positions, weights.shape[1])).argmax(1)


def _leading(accepted: Tensor, lengths: Tensor) -> Tensor:
    """Count the true values at the start of each row of `accepted` `(sequences, drafts)`, among the row's first `lengths` values.

    Example: the row true, true, false, true gives 2 with length 4, and 1 with length 1.
    """
    within = torch.arange(accepted.shape[1], device=accepted.device) < lengths[:, None]
    return (accepted & within).long().cumprod(1).sum(1)
