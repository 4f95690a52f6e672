"""The text of a request as its tokens arrive: detokenised, cut at stop strings, with log probabilities."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from meshwright.serve.stops import StopStrings
from meshwright.serve.text import INCOMPLETE, TextStream
from meshwright.server.engine_client import News
from meshwright.server.token_logprobs import CompletionEntry, CompletionLogprobs, TextLogprobs


class TextOutput:
    """Decoder of one text from its tokens, up to a stop string."""

    def __init__(
        self,
        stream: TextStream,
        stops: StopStrings | None,
        logprobs: TextLogprobs | None,
        reported_stops: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """`reported_stops`: token ids that the answer names if they end the text. No stop string ends the first `min_tokens`."""
        self._stream = stream
        self._stops = stops
        self._logprobs = None if logprobs is None else _AlignedLogprobs(logprobs)
        self._reported_stops = reported_stops
        self._min_tokens = min_tokens
        self.tokens = 0
        """New tokens so far. Tokens after the one that completes a stop string do not count."""
        self.finish_reason: str | None = None
        """Reason why the text has ended, as OpenAI names it; None while it goes on."""
        self.stop_reason: str | int | None = None
        """The stop string or token id of the request that ended the text."""
        self.cached_tokens = 0
        """Tokens of the prompt that were in the cache."""

    def add(self, news: Sequence[News]) -> str:
        """The text that is final after these news and was not before. The news are of this text, in order."""
        if self._stops is None and self._logprobs is None:
            return "".join([self._add_plain(one) for one in news])
        return "".join([self._add_each(one) for one in news if self.finish_reason is None])

    def _add_plain(self, news: News) -> str:
        self.tokens += len(news.tokens)
        text = self._stream.add(news.tokens)
        if news.cached_tokens:
            self.cached_tokens = news.cached_tokens
        if news.reason is not None:
            text += self._stream.finish()
            self._end(news)
        return text

    def _add_each(self, news: News) -> str:
        """Add tokens one by one, so that tokens after a stop string do not count."""
        stream = self._stream
        stops = self._stops
        logprobs = self._logprobs
        self.cached_tokens = news.cached_tokens or self.cached_tokens
        shown = []
        for index, token in enumerate(news.tokens):
            text, content = stream.add_one(token)
            self.tokens += 1
            if logprobs is not None and news.logprobs:
                logprobs.add(text, content, news.logprobs[index], incomplete=stream.incomplete)
            if stops is not None:
                text = stops.add(text, may_stop=self.tokens > self._min_tokens)
            shown.append(text)
            if stops is not None and stops.complete:
                break
        else:
            if news.reason is not None:
                ending = stream.finish()
                if logprobs is not None:
                    logprobs.complete(ending)
                shown.append(ending if stops is None else stops.add(ending, may_stop=self.tokens > self._min_tokens))
                if stops is not None and not stops.complete:
                    shown.append(stops.finish())
                self._end(news)
        if stops is not None and stops.complete:
            self.finish_reason = "stop"
            self.stop_reason = stops.reached
        text = "".join(shown)
        if logprobs is not None:
            logprobs.show(len(text), final=self.finish_reason is not None)
        return text

    def add_prompt(self, entries: Sequence[CompletionEntry]) -> None:
        """Put the log probabilities of the prompt before those of the text, in the form of /v1/completions."""
        if self._logprobs is not None:
            self._logprobs.add_prompt(entries)

    def _end(self, news: News) -> None:
        self.finish_reason = "stop" if news.reason == "stop" else "length"
        if news.stop_token in self._reported_stops:
            self.stop_reason = news.stop_token

    def logprobs(self, *, whole: bool = False) -> str | None:
        """The log probabilities of the text since the last call, as JSON.

        None if they were not asked for, or, without `whole`, if there are none.
        """
        if self._logprobs is None or not (whole or self._logprobs.waiting):
            return None
        return self._logprobs.take()


class _AlignedLogprobs:
    """Log probabilities of tokens. They are held back and cut together with the text of the tokens."""

    def __init__(self, shown: TextLogprobs) -> None:
        self._shown = shown
        self._held: list[list[Any]] = []
        """For each token that is not shown yet: text, bytes, log probabilities, and whether a character ends with it."""
        self._characters = 0
        """Characters of the held tokens that the text already has."""
        self.waiting = False
        """Whether tokens were shown since the last call of `take`."""

    def add(self, text: str, content: bytes, logprob: Sequence[Any], *, incomplete: bool) -> None:
        """Append a token with what it adds to the text before stop strings cut it.

        `incomplete` says that the token ends inside a character.
        """
        self._held.append([text, content, logprob, not incomplete])

    def add_prompt(self, entries: Sequence[CompletionEntry]) -> None:
        """Show the tokens of the prompt."""
        assert isinstance(self._shown, CompletionLogprobs), "chats are not echoed"
        self._shown.add_prompt(entries)
        self.waiting = True

    def complete(self, ending: str) -> None:
        """Give the last token the end of the text, which is no complete character."""
        if ending and self._held:
            self._held[-1][0] += ending

    def show(self, characters: int, *, final: bool) -> None:
        """Show the tokens of the next `characters` characters. `final`: the rest of the text is cut off."""
        self._characters += characters
        if final:
            self._cut()
        count = shown = 0
        for index, (text, _, _, complete) in enumerate(self._held):
            shown += len(text)
            if shown > self._characters:
                break
            if complete or final:  # parts of a character go with its last token
                count = index + 1
        for text, content, logprob, _ in self._held[:count]:
            self._characters -= len(text)
            self._shown.add(text, content, *logprob)
        self.waiting = self.waiting or count > 0
        del self._held[:count]

    def _cut(self) -> None:
        """Remove the text after the end from the held tokens."""
        whole = "".join([entry[0] for entry in self._held])
        kept = whole[: self._characters]
        behind = whole[self._characters :]
        surplus = len(behind)
        surplus_bytes = len(behind.encode("utf-8"))
        if INCOMPLETE not in kept:  # tokens of the kept text may have parts of the next character
            surplus_bytes = max(sum([len(entry[1]) for entry in self._held]) - len(kept.encode("utf-8")), 0)
        for entry in reversed(self._held):
            text, content = entry[:2]
            taken = min(surplus, len(text))
            taken_bytes = min(surplus_bytes, len(content))
            entry[:2] = text[: len(text) - taken], content[: len(content) - taken_bytes]
            surplus = surplus - taken
            surplus_bytes = surplus_bytes - taken_bytes

    def take(self) -> str:
        """The JSON of the tokens since the last call."""
        self.waiting = False
        return self._shown.take()
