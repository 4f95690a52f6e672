"""The output of unfinished requests: what stops them, and the tokens and text that are not reported yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from meshwright.policies.batch_request import Reason
from meshwright.serve.failures import NotFinite, RequestFailure
from meshwright.serve.grammar import GrammarMatcher
from meshwright.serve.prompt_logprobs import PromptLogprobs
from meshwright.serve.sampling import SamplingOptions
from meshwright.serve.stops import StopStrings, StringSearch
from meshwright.serve.text import TextStream
from meshwright.spec.errors import BadInput


class TokenLogprob(NamedTuple):
    """Log probability of a new token by the model, before any sampling option applies."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, the likeliest first, each with its log probability; as many as `SamplingOptions.top_logprobs`."""


class Update(NamedTuple):
    """News of one request after a step."""

    number: int
    tokens: tuple[int, ...]
    """New tokens; a stop token is not among them."""
    text: str
    """The new text, as far as later tokens cannot change it; empty without a tokenizer."""
    reason: Reason | None
    """Reason why the request has ended; None while it goes on."""
    error: str | None = None
    """Error message, with the reason "failed"."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log probability of each of `tokens`, if `SamplingOptions.logprobs` is set."""
    code: str | None = None
    """Kind of the error, with the reason "failed": "engine_failed" if a step on the device failed. If only this request failed, "grammar",
    "not_finite" (its logits) or "request_failed"."""
    stop_token: int | None = None
    """Token of `stop_ids` that ended the text, with the reason "stop"."""
    cached_tokens: int = 0
    """Tokens of the prompt that were taken from the prefix cache, in the first update."""
    stop_logprob: float | None = None
    """Log probability of `stop_token`, if `SamplingOptions.logprobs` is set."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of the next tokens of the prompt, from its second token on, if `SamplingOptions.prompt_logprobs` is set."""

    @property
    def details(self) -> dict[str, Any]:
        """The fields that have a value, without number, tokens and text, for messages between processes of a server."""
        fields = {
            "reason": self.reason,
            "error": self.error,
            "code": self.code,
            "logprobs": self.logprobs or None,
            "stop_token": self.stop_token,
            "cached_tokens": self.cached_tokens or None,
            "prompt_logprobs": None if self.prompt_logprobs is None else self.prompt_logprobs.packed(),
        }
        return {key: value for key, value in fields.items() if value is not None}


class Generation:
    """The output of one request. It ends at a token of `stop_ids`, or where one of `stop_strings` is complete."""

    def __init__(
        self,
        sampling: SamplingOptions,
        stream: TextStream | None,
        stop_ids: Collection[int],
        stop_strings: Sequence[str],
        matcher: GrammarMatcher | None = None,
        *,
        reports_steps: bool = True,
    ) -> None:
        self.sampling = sampling
        self.matcher = matcher
        """Follows the text, if the request has a grammar."""
        self.reports_steps = reports_steps
        self.stop_ids = frozenset(stop_ids)
        self._stream = stream
        self._stops = StopStrings(StringSearch(stop_strings))
        self._tokens: list[int] = []
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self._early = sampling.min_tokens
        """Number of next tokens in which no stop string ends the text (`SamplingOptions.min_tokens`)."""
        self._stop_token: int | None = None
        self._stop_logprob: float | None = None
        self._prompt_logprobs: PromptLogprobs | None = None
        self.scored = 0
        """Positions of the prompt whose logits have given log probabilities, counted when a step is launched."""
        self._cached: int | None = None
        """Cached tokens of the prompt; 0 once they are reported, None before they are known."""

    def note_cached(self, tokens: int) -> None:
        """Note the cached tokens of the prompt when the request begins; later calls, after a preemption, change nothing."""
        if self._cached is None:
            self._cached = tokens

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Add the log probabilities of the prompt's next tokens. Raises NotFinite where one is NaN."""
        if not logprobs.finite:
            raise NotFinite
        if self._prompt_logprobs is None:
            self._prompt_logprobs = logprobs
        else:
            self._prompt_logprobs.extend(logprobs)

    def add(self, token: int, logprob: TokenLogprob | None = None) -> bool:
        """Add the next token; returns whether it ends the request. Raises NotFinite for one that could not be drawn."""
        if token < 0:  # `sampling.mark_not_finite`
            raise NotFinite
        if token in self.stop_ids:
            self._stop_token = token
            if logprob is not None and self.sampling.logprobs:
                self._stop_logprob = logprob.chosen
            return True
        self._tokens.append(token)
        if logprob is not None and self.sampling.logprobs:
            wanted = self.sampling.top_logprobs
            self._logprobs.append(logprob._replace(top=logprob.top[:wanted]) if len(logprob.top) > wanted else logprob)
        if self.matcher is not None:
            self.matcher.advance(token)
        if self._stream is not None:
            self._text += self._stops.add(self._stream.add([token]), may_stop=self._early <= 0)
            self._early -= 1
        return self._stops.complete

    def begin_after(self, tokens: Sequence[int]) -> None:
        """Add tokens that were reported before. Raises BadInput if they end the text."""
        if any(self.add(token) for token in tokens):
            raise BadInput("the new tokens that are given end the text")
        self._tokens = []
        self._text = ""
        self._logprobs = []
        if tokens:
            self._cached = 0

    def add_drafted(self, new: Sequence[tuple[int, TokenLogprob | None]]) -> tuple[list[int], bool]:
        """Add tokens up to the one that ends the request; returns these tokens, and whether they end it."""
        taken = []
        for token, logprob in new:
            taken.append(token)
            if self.add(token, logprob):
                return taken, True
        return taken, False

    def update(self, number: int, reason: Reason | None = None, failure: RequestFailure | None = None) -> Update:
        """The output since the last update. With a reason the request has ended, so text that waited for later tokens is included."""
        if reason is not None and self._stream is not None and not self._stops.complete:
            self._text += self._stops.add(self._stream.finish(), may_stop=self._early < 0) + self._stops.finish()
        error, code = (None, None) if failure is None else failure
        update = Update(
            number,
            tuple(self._tokens),
            self._text,
            reason,
            error,
            tuple(self._logprobs),
            code,
            stop_token=self._stop_token if reason == "stop" else None,
            cached_tokens=self._cached or 0,
            stop_logprob=self._stop_logprob if reason == "stop" else None,
            prompt_logprobs=self._prompt_logprobs,
        )
        self._tokens = []
        self._text = ""
        self._logprobs = []
        self._cached = 0
        self._prompt_logprobs = None
        return update
