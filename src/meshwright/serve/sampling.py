"""Sampling of new tokens on the device, for a batch of requests with different options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.kernels.likeliest import keep_likeliest
from meshwright.kernels.loss import log_probabilities_of_logits
from meshwright.kernels.token_draw import draw_from_scores
from meshwright.serve.device_tables import MirroredTable, WideTable, copy_to_device
from meshwright.serve.excluded_tokens import ExcludedTokens
from meshwright.serve.logit_filters import NEW_TOKEN, add_biases, keep_allowed, penalise
from meshwright.serve.sampling_options import GREEDY, SamplingOptions

__all__ = ["GREEDY", "Sampler", "SamplingOptions", "TokenLogprobs"]


LEAST_LOGPROB = -9999.0
"""Stands for the log probability of a token that the model excludes, as in OpenAI's API: JSON has no infinity."""


class TokenLogprobs(NamedTuple):
    """Log probabilities of the model, before any sampling option applies."""

    chosen: Tensor
    """`(samples,)` fp32: those of the tokens that were taken."""
    top_tokens: Tensor
    """`(samples, most)` int64: the likeliest tokens, in falling order; `most` is the largest number that a request asks for."""
    top: Tensor
    """`(samples, most)` fp32: their log probabilities."""


class Sampler:
    """Draws tokens for the requests of a batch; the options of each table row are on the device.

    A drawn token is a function of the request's logits, its seed and the token's position, so it does not depend on the batch.
    """

    divides_in_scores = False
    """Whether `scores` always divides by the temperature. If not, the kernel that draws does it where no other option applies."""

    def __init__(self, table_rows: int, device: torch.device, vocab: int) -> None:
        self._device = device
        self.vocab = vocab
        self._floats = MirroredTable(6, table_rows, torch.float32, device)
        self._integers = MirroredTable(3, table_rows, torch.int64, device)
        self._biased_tokens = WideTable(table_rows, torch.int64, device, padding=0)
        self._biases = WideTable(table_rows, torch.float32, device, padding=0)
        self._excluded = ExcludedTokens(table_rows, vocab, device)
        self._history = _TokenHistory(vocab, device)
        self._assigned: dict[int, SamplingOptions] = {}
        self._drawing = self._filtering = self._penalising = 0
        """Numbers of assigned rows that draw, that filter, and that penalise."""
        self._logprobs: Counter[int] = Counter()
        """For each number of top log probabilities: how many assigned rows want that number."""

    @property
    def greedy(self) -> bool:
        """Whether all requests take the token with the largest logit."""
        return not (self._drawing or self._changes_scores)

    @property
    def _changes_scores(self) -> bool:
        """Whether an option of a request may change which token is the likeliest."""
        return bool(self._penalising or self._biases.rows or self._excluded)

    @property
    def wants_logprobs(self) -> bool:
        """Whether a request wants log probabilities."""
        return bool(self._logprobs)

    def assign(
        self,
        table_row: int,
        options: SamplingOptions,
        tokens: Sequence[int] = (),
        prompt_tokens: int = 0,
        stop_ids: Collection[int] = (),
    ) -> None:
        """Give a table row to a request. `tokens` is its text so far, of which the first `prompt_tokens` are the prompt.

        `stop_ids` are not drawn before `SamplingOptions.min_tokens`.
        """
        self.release(table_row)
        temperature = options.temperature if options.draws else 0.0
        penalties = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
        self._floats.set(table_row, (temperature, options.top_p, options.min_p, *penalties))
        slot = self._history.begin(table_row, tokens, prompt_tokens) if options.penalises else 0
        self._integers.set(table_row, (options.top_k, options.seed, slot))
        self._biased_tokens.set(table_row, options.logit_bias.keys())
        self._biases.set(table_row, options.logit_bias.values())
        self._excluded.begin(table_row, options, stop_ids, tokens, prompt_tokens)
        self._assigned[table_row] = options
        self._count(options, 1)

    def release(self, table_row: int) -> None:
        """Free a table row whose request has ended, or whose options could not be assigned."""
        if (options := self._assigned.pop(table_row, None)) is not None:
            self._count(options, -1)
        self._history.end(table_row)
        self._biases.release(table_row)
        self._excluded.end(table_row)

    def sample(self, logits: Tensor, table_rows: Tensor, positions: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The next tokens `(samples,)` int32 of logits `(samples, vocab)`.

        `table_rows` and `positions` `(samples,)` are the rows of the options and the positions of the new tokens. `allowed` is None or
        the bitmask of grammars (`logit_filters.keep_allowed`). The new tokens are counted for the penalties of later ones.
        """
        if self.greedy:
            return (logits if allowed is None else keep_allowed(logits.float(), allowed)).argmax(1).to(torch.int32)
        self.copy_options()
        temperatures = self._floats.here[0, table_rows]
        seeds = self._integers.here[1, table_rows]
        scores = logits
        changed = self._filtering or self._changes_scores or allowed is not None
        if changed or self.divides_in_scores:
            scores = self.scores(logits, table_rows, positions, allowed)
            temperatures = (temperatures > 0).float()
        tokens = draw_from_scores(scores, temperatures, seeds, positions.long())
        if self._penalising:
            self._history.add(self._integers.here[2, table_rows], tokens)
        self._excluded.add(table_rows, tokens)
        return tokens.to(torch.int32)

    def scores(self, logits: Tensor, table_rows: Tensor, positions: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Scores `(samples, vocab)` in fp32 whose softmax is the distribution that the options describe.

        The arguments are those of `sample`. A row at temperature 0 keeps the scale of its logits; its likeliest token is taken.
        """
        self.copy_options()
        temperature, top_p, min_p, repetition, presence, frequency = self._floats.here[:, table_rows]
        top_k, _, slots = self._integers.here[:, table_rows]
        scores = logits.float()
        if self._penalising:
            scores = penalise(scores, self._history.counts[slots], repetition, presence, frequency)
        if self._biases.rows:
            scores = add_biases(scores, self._biased_tokens.values[table_rows], self._biases.values[table_rows])
        if allowed is not None:
            scores = keep_allowed(scores, allowed)
        if self._excluded:
            scores = self._excluded.apply(scores, table_rows, positions)
        if self._drawing:
            scores = scores / torch.where(temperature > 0, temperature, 1.0)[:, None]
        if self._filtering:
            scores = keep_likeliest(scores, top_k, top_p, min_p)
        return scores

    def draft_scores(self, logits: Tensor, table_rows: Tensor) -> Tensor:
        """As `scores`, for drafts: without penalties, biases and excluded tokens, so that the operations are the same for all options."""
        temperature, top_p, min_p, *_ = self._floats.here[:, table_rows]
        scores = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        return keep_likeliest(scores, self._integers.here[0, table_rows], top_p, min_p)

    def draws(self, table_rows: Tensor) -> tuple[Tensor, Tensor]:
        """For table rows `(sequences,)`: whether they draw tokens or take the likeliest, and their seeds."""
        self.copy_options()
        return self._floats.here[0, table_rows] > 0, self._integers.here[1, table_rows]

    @property
    def most_logprobs(self) -> int:
        """The largest number of likeliest tokens that a request wants for each new token."""
        return max(self._logprobs, default=0)

    def logprobs(self, logits: Tensor, tokens: Tensor, most: int | None = None) -> TokenLogprobs:
        """Log probabilities by logits `(samples, vocab)`: of `tokens` `(samples,)`, and of the `most` likeliest tokens.

        Without a value, `most` is `most_logprobs`. A token that is in both results has the same bits in both.
        """
        most = min(self.most_logprobs if most is None else most, self.vocab)
        if not most:  # one pass over the logits
            chosen = log_probabilities_of_logits(logits, tokens.long())
            none = chosen.new_empty(len(chosen), 0)
            return TokenLogprobs(finite(chosen), none.long(), none)
        logprobs = logits.float().log_softmax(1)
        top, top_tokens = logprobs.topk(most, dim=1)
        chosen = logprobs.gather(1, tokens.long()[:, None])[:, 0]
        return TokenLogprobs(finite(chosen), top_tokens, finite(top))

    def copy_options(self) -> None:
        """Copy changed options to the device."""
        self._floats.copy()
        self._integers.copy()

    def _count(self, options: SamplingOptions, change: int) -> None:
        self._drawing += change * options.draws
        self._filtering += change * options.filters
        self._penalising += change * options.penalises
        if options.logprobs:
            self._logprobs[options.top_logprobs] += change
            self._logprobs += Counter()  # drops numbers that no row wants any more


def mark_not_finite(tokens: Tensor, logits: Tensor) -> Tensor:
    """Tokens `(samples,)`, with -1 where the logits `(samples, vocab)` have NaN or +infinity, or exclude all tokens."""
    largest = logits.amax(1)
    return torch.where(largest * 0 == 0, tokens, -1)  # NaN and infinity times 0 are NaN


def with_chosen(logprobs: TokenLogprobs, chosen: Tensor, tokens: Tensor) -> TokenLogprobs:
    """Log probabilities with other values `chosen` of `tokens` `(samples,)`, also where these are among the likeliest."""
    top = torch.where(logprobs.top_tokens == tokens[:, None], chosen[:, None], logprobs.top)
    return logprobs._replace(chosen=chosen, top=top)


def finite(logprobs: Tensor) -> Tensor:
    """Log probabilities without NaN and infinity, which JSON lacks."""
    return logprobs.nan_to_num(nan=LEAST_LOGPROB, neginf=LEAST_LOGPROB)


class _TokenHistory:
    """How often each token is in the prompt and the new text of requests with penalties.

    Only these requests have a slot of `counts`, which grows with their number. All other requests share slot 0, which is never used.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._device = device
        self.counts = torch.zeros(1, vocab, dtype=torch.int32, device=device)
        """`(slots, vocab)`, as `logit_filters.penalise` reads it."""
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []

    def begin(self, table_row: int, tokens: Sequence[int], prompt_tokens: int) -> int:
        """Count the tokens of a request; returns its slot."""
        if not self._free:
            slots = len(self.counts)
            self.counts = functional.pad(self.counts, (0, 0, 0, max(slots, 4)))
            self._free = list(range(len(self.counts) - 1, slots - 1, -1))
        self._slot_of[table_row] = slot = self._free.pop()
        counts = self.counts[slot]
        ids = torch.empty(len(tokens), dtype=torch.int64, device=self._device)
        copy_to_device(torch.tensor(tokens, dtype=torch.int64), ids)
        counts.zero_()
        counts[ids[:prompt_tokens]] = 1
        new = ids[prompt_tokens:]
        counts.index_add_(0, new, torch.full_like(new, NEW_TOKEN, dtype=torch.int32))
        return slot

    def end(self, table_row: int) -> None:
        """Free the slot of a table row, if it has one."""
        if (slot := self._slot_of.pop(table_row, None)) is not None:
            self._free.append(slot)

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count new tokens `(samples,)` in slots `(samples,)`."""
        new = torch.full_like(tokens, NEW_TOKEN, dtype=torch.int32)
        self.counts.index_put_((slots, tokens), new, accumulate=True)
