"""The text of a request as its tokens arrive: detokenised, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.serve.stops import StopStrings
from meshwright.serve.text import TextStream
from meshwright.server.bodies import TokenEntry
from meshwright.server.engine_client import News

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextOutput:
    """Decoder of one text from its tokens, up to a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        *,
        logprobs: bool,
        special: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`special`: the text has special tokens. `min_tokens`: first tokens in which no stop string ends it."""
        self._stream = TextStream(tokenizer, special=special)
        self._stops = StopStrings(stop_strings) if stop_strings else None
        self._with_logprobs = logprobs
        self._early = min_tokens
        """Further tokens in which no stop string ends the text."""
        self.tokens = 0
        """New tokens so far."""
        self.finish_reason: str | None = None
        """Reason why the text has ended, as OpenAI names it; None while it goes on."""

    def add(self, news: Sequence[News]) -> str:
        """Return the further text that is final after these news, which belong to this text and are in order."""
        tokens = [token for one in news for token in one.tokens] if len(news) > 1 else list(news[0].tokens)
        self.tokens += len(tokens)
        if self._stops is None:
            text = self._stream.add(tokens)
        else:
            first, tokens = tokens[: self._early], tokens[self._early :]
            self._early -= len(first)
            text = self._stops.add(self._stream.add(first), ends=False) if first else ""
            text += self._stops.add(self._stream.add(tokens), ends=not self._early)
            if self._stops.complete:
                self.finish_reason = "stop"
                return text
        if (reason := news[-1].reason) is not None:
            self.finish_reason = "stop" if reason == "stop" else "length"
            ending = self._stream.finish()
            if self._stops is None:
                return text + ending
            text += self._stops.add(ending, ends=not self._early)
            if self._stops.complete:
                self.finish_reason = "stop"
            else:
                text += self._stops.finish()
        return text

    def logprobs(self, news: Sequence[News]) -> list[TokenEntry] | None:
        """The log probabilities in the news; None if they were not asked for."""
        if not self._with_logprobs:
            return None
        return [
            TokenEntry(token, *logprob)
            for one in news
            for token, logprob in zip(one.tokens, one.logprobs, strict=bool(one.logprobs))
        ]
