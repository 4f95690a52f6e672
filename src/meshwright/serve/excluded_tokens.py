"""Tokens that may not be drawn because of a request's options:

- with `allowed_token_ids`: all tokens that are not in the list;
- with `bad_words`: the last token of a bad word, if the tokens before it are the last new tokens of the request;
- with `min_tokens`: the stop ids, as long as the request has fewer new tokens.

All data is on the device, so the host need not know the newest tokens and steps can overlap. The position of a new token tells how many
new tokens came before it. For requests with bad words, the last new tokens are kept on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from meshwright.serve.device_tables import WideTable, copy_to_device
from meshwright.serve.logit_filters import exclude, listed
from meshwright.serve.sampling_options import LONGEST_BAD_WORD, SamplingOptions


class ExcludedTokens:
    """The excluded tokens of all table rows.

    Lists of tokens are padded at the end with the id `vocab`. Bad words, and the last new tokens of a request with few tokens, are padded
    at the front with -1.
    """

    def __init__(self, table_rows: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._allowed = WideTable(table_rows, torch.int32, device, padding=vocab)
        self._words = WideTable(table_rows, torch.int32, device, padding=-1)
        """The bad words of each row, one after the other; each has `LONGEST_BAD_WORD` columns."""
        self._stops = WideTable(table_rows, torch.int32, device, padding=vocab)
        self._first_ends = torch.zeros(table_rows, dtype=torch.int64, device=device)
        """`(table_rows,)`: the first position at which stop ids may be drawn."""
        self._newest = torch.full((table_rows, LONGEST_BAD_WORD - 1), -1, dtype=torch.int32, device=device)
        """`(table_rows, LONGEST_BAD_WORD - 1)`: the last new tokens of each request with bad words."""

    def __bool__(self) -> bool:
        """Return whether any request may exclude tokens."""
        return bool(self._allowed.rows or self._words.rows or self._stops.rows)

    def begin(
        self,
        table_row: int,
        options: SamplingOptions,
        stop_ids: Collection[int],
        tokens: Sequence[int],
        prompt_tokens: int,
    ) -> None:
        """Set the options of a table row's request. `tokens` are all its tokens so far; the first `prompt_tokens` are the prompt."""
        self._allowed.set(table_row, options.allowed_token_ids or ())
        self._words.set(table_row, _padded_words(options.bad_words))
        self._stops.set(table_row, stop_ids if options.min_tokens else ())
        if options.min_tokens:
            copy_to_device(torch.tensor(prompt_tokens + options.min_tokens), self._first_ends[table_row])
        if options.bad_words:
            newest = tokens[prompt_tokens:][1 - LONGEST_BAD_WORD :]
            copy_to_device(torch.tensor(_padded(newest, LONGEST_BAD_WORD - 1)), self._newest[table_row])

    def end(self, table_row: int) -> None:
        """Forget a table row whose request has ended."""
        for table in (self._allowed, self._words, self._stops):
            table.release(table_row)

    def apply(self, scores: Tensor, table_rows: Tensor, positions: Tensor) -> Tensor:
        """Set the scores `(samples, vocab)` of excluded tokens to `REMOVED`. `positions` `(samples,)` has the positions of new tokens."""
        vocab = self._vocab
        if self._allowed.rows:
            allowed = self._allowed.values[table_rows]
            scores = exclude(scores, ~listed(allowed, vocab) & (allowed[:, :1] < vocab))
        if self._words.rows:
            words = self._words.values[table_rows].unflatten(1, (-1, LONGEST_BAD_WORD))
            begins = words[:, :, :-1]
            last = words[:, :, -1]
            follows = ((begins == self._newest[table_rows][:, None]) | (begins < 0)).all(2) & (last >= 0)
            scores = exclude(scores, listed(torch.where(follows, last, vocab), vocab))
        if self._stops.rows:
            early = (positions < self._first_ends[table_rows])[:, None]
            scores = exclude(scores, listed(torch.where(early, self._stops.values[table_rows], vocab), vocab))
        return scores

    def add(self, table_rows: Tensor, tokens: Tensor) -> None:
        """Append a new token to the last tokens of each of `table_rows`. Both arguments are `(samples,)`.

        A request with bad words of several tokens has no drafts, so its row is in `table_rows` only once.
        """
        if self._words.rows:
            newest = torch.cat((self._newest[table_rows], tokens.to(torch.int32)[:, None]), 1)
            self._newest[table_rows] = newest[:, 1:]


def _padded_words(words: Iterable[Sequence[int]]) -> list[int]:
    return [token for word in words for token in _padded(word, LONGEST_BAD_WORD)]


def _padded(tokens: Sequence[int], length: int) -> list[int]:
    return [-1] * (length - len(tokens)) + list(tokens)
