"""The output of unfinished requests: their stops, and the tokens and text that are not reported yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from meshwright.policies.batch_request import Reason
from meshwright.serve.sampling import SamplingOptions
from meshwright.serve.stops import StopStrings
from meshwright.serve.text import TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Update(NamedTuple):
    """News of one request after a step."""

    number: int
    tokens: tuple[int, ...]
    """New tokens; a stop token is not among them."""
    text: str
    """Their text, as far as it is certain; empty without a tokenizer."""
    reason: Reason | None
    """Why the request has ended; None while it goes on."""
    error: str | None = None
    """What failed, with the reason "failed"."""


class Generation:
    """The output of one request. It ends at a token of `stop_ids`, or where one of `stop_strings` is complete."""

    def __init__(
        self,
        sampling: SamplingOptions,
        tokenizer: Tokenizer | None,
        stop_ids: Collection[int],
        stop_strings: Sequence[str],
    ) -> None:
        self.sampling = sampling
        self._stop_ids = frozenset(stop_ids)
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._stops = StopStrings(stop_strings)
        self._tokens: list[int] = []
        self._text = ""

    def add(self, token: int) -> bool:
        """Take in the next token; whether it ends the request."""
        if token in self._stop_ids:
            return True
        self._tokens.append(token)
        if self._stream is not None:
            self._text += self._stops.add(self._stream.add([token]))
        return self._stops.complete

    def update(self, number: int, reason: Reason | None = None, error: str | None = None) -> Update:
        """What has come since the last update; with a reason also the text that was held back."""
        if reason is not None and self._stream is not None and not self._stops.complete:
            self._text += self._stops.add(self._stream.finish()) + self._stops.finish()
        update = Update(number, tuple(self._tokens), self._text, reason, error)
        self._tokens, self._text = [], ""
        return update
