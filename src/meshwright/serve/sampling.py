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
"""Replaces the log probability -infinity of a token that the model excludes, as in OpenAI's API, because JSON has no infinity."""


class TokenLogprobs(NamedTuple):
    """Log probabilities of tokens by the model, before any sampling option is applied."""

    chosen: Tensor
    """`(samples,)` fp32: log probability of the token that was drawn."""
    top_tokens: Tensor
    """`(samples, most)` int64: the likeliest tokens, the likeliest first. `most` is the largest number that a request asks for."""
    top: Tensor
    """`(samples, most)` fp32: the log probabilities of `top_tokens`."""


class Sampler:
    """Draws tokens for the requests of a batch. Each table row of the engine has the sampling options of one request, on the device.

    A drawn token depends only on the request's logits, options and seed, and on the token's position. So it does not depend on the batch.
    """

    divides_in_scores = False
    """Whether `sample` always divides by the temperature in `scores`.

    If not, and no other option changes the scores, the kernel that draws the tokens divides by the temperature.
    """

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
        """Number of assigned table rows with `SamplingOptions.draws`, with `filters`, and with `penalises`."""
        self._logprobs: Counter[int] = Counter()
        """Maps a value of `SamplingOptions.top_logprobs` to the number of assigned rows that have this value.

        Only rows whose requests want log probabilities count.
        """

    @property
    def greedy(self) -> bool:
        """Whether all requests take the token with the largest logit."""
        return not (self._drawing or self._changes_scores)

    @property
    def _changes_scores(self) -> bool:
        """Whether an option of a request (penalties, biases, excluded tokens) may change which token is the likeliest."""
        return bool(self._penalising or self._biases.rows or self._excluded)

    @property
    def wants_logprobs(self) -> bool:
        """Whether a request wants log probabilities of its new tokens."""
        return bool(self._logprobs)

    def assign(
        self,
        table_row: int,
        options: SamplingOptions,
        tokens: Sequence[int] = (),
        prompt_tokens: int = 0,
        stop_ids: Collection[int] = (),
    ) -> None:
        """Give a table row to a request.

        - `tokens`: all tokens of the request so far; the first `prompt_tokens` of them are the prompt.
        - `stop_ids`: tokens that are not drawn before the request has `SamplingOptions.min_tokens` new tokens.
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
        """Draw a token for each row of logits `(samples, vocab)`. Returns `(samples,)` int32.

        - `table_rows`: `(samples,)`: the table row with the options of each sample.
        - `positions`: `(samples,)`: the position of each new token in its request.
        - `allowed`: the bitmask of tokens that grammars allow (`logit_filters.keep_allowed`), or None.

        The new tokens are counted for the penalties of later tokens.
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
        """Apply all sampling options to logits. Returns fp32 scores `(samples, vocab)`; tokens are drawn from their softmax.

        The arguments are those of `sample`. Scores of a row with temperature 0 are not divided by the temperature; the token with the
        largest score is taken.
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
        """Return the scores of drafts, `(samples, vocab)`: `scores` without penalties, biases and excluded tokens.

        The operations are the same for all options, so that a CUDA graph can capture them.
        """
        temperature, top_p, min_p, *_ = self._floats.here[:, table_rows]
        scores = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        return keep_likeliest(scores, self._integers.here[0, table_rows], top_p, min_p)

    def draws(self, table_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for table rows `(sequences,)`, whether each draws its tokens at random, and its seed. Both are `(sequences,)`."""
        self.copy_options()
        return self._floats.here[0, table_rows] > 0, self._integers.here[1, table_rows]

    @property
    def most_logprobs(self) -> int:
        """The largest `SamplingOptions.top_logprobs` of the assigned requests."""
        return max(self._logprobs, default=0)

    def logprobs(self, logits: Tensor, tokens: Tensor, most: int | None = None) -> TokenLogprobs:
        """Compute log probabilities from logits `(samples, vocab)`: of `tokens` `(samples,)`, and of the `most` likeliest tokens.

        `most` is `most_logprobs` by default. If a token is in both results, its log probability has the same bits in both.
        """
        most = min(self.most_logprobs if most is None else most, self.vocab)
        if not most:  # Without the likeliest tokens, one pass over the logits is enough.
            chosen = log_probabilities_of_logits(logits, tokens.long())
            none = chosen.new_empty(len(chosen), 0)
            return TokenLogprobs(finite(chosen), none.long(), none)
        logprobs = logits.float().log_softmax(1)
        top, top_tokens = logprobs.topk(most, dim=1)
        chosen = logprobs.gather(1, tokens.long()[:, None])[:, 0]
        return TokenLogprobs(finite(chosen), top_tokens, finite(top))

    def copy_options(self) -> None:
        """Copy the options of table rows that have changed to the device."""
        self._floats.copy()
        self._integers.copy()

    def _count(self, options: SamplingOptions, change: int) -> None:
        self._drawing += change * options.draws
        self._filtering += change * options.filters
        self._penalising += change * options.penalises
        if options.logprobs:
            self._logprobs[options.top_logprobs] += change
            self._logprobs += Counter()  # This removes entries whose count is 0.


def mark_not_finite(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return tokens `(samples,)`, with -1 where the row of logits `(samples, vocab)` has NaN or +infinity, or only -infinity."""
    largest = logits.amax(1)
    return torch.where(largest * 0 == 0, tokens, -1)  # NaN · 0 and ±infinity · 0 are NaN, which does not equal 0.


def with_chosen(logprobs: TokenLogprobs, chosen: Tensor, tokens: Tensor) -> TokenLogprobs:
    """Return `logprobs` with the log probabilities `chosen` for `tokens`, both `(samples,)`.

    Where a token is also among the likeliest tokens of its sample, its value there is replaced too.
    """
    top = torch.where(logprobs.top_tokens == tokens[:, None], chosen[:, None], logprobs.top)
    return logprobs._replace(chosen=chosen, top=top)


def finite(logprobs: Tensor) -> Tensor:
    """Return log probabilities with NaN and -infinity replaced by `LEAST_LOGPROB`, because JSON has neither."""
    return logprobs.nan_to_num(nan=LEAST_LOGPROB, neginf=LEAST_LOGPROB)


class _TokenHistory:
    """Counts of the tokens in the prompt and in the new text of requests with penalties.

    `counts` has a slot for each of these requests, and grows with their number. All requests without penalties have slot 0, whose counts
    have no effect.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._device = device
        self.counts = torch.zeros(1, vocab, dtype=torch.int32, device=device)
        """`(slots, vocab)` int32, in the form that `logit_filters.penalise` reads."""
        self._slot_of: dict[int, int] = {}
        """By table row: the slot of its request."""
        self._free: list[int] = []
        """Slots that no request has."""

    def begin(self, table_row: int, tokens: Sequence[int], prompt_tokens: int) -> int:
        """Give the request of a table row a slot, and count its tokens, of which `prompt_tokens` are the prompt. Returns the slot."""
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
        """Count one new token in each of the slots. Both arguments are `(samples,)`."""
        new = torch.full_like(tokens, NEW_TOKEN, dtype=torch.int32)
        self.counts.index_put_((slots, tokens), new, accumulate=True)
