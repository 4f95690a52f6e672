"""The output of a request: `Generation` checks whether a token ends the request, and keeps tokens and text until they are reported."""

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
    """Log probability of the token."""
    top: tuple[tuple[int, float], ...]
    """`(token, log probability)` of the likeliest tokens, the likeliest first. There are `SamplingOptions.top_logprobs` of them."""


class Update(NamedTuple):
    """The new output of one request after a step."""

    number: int
    """Number of the request."""
    tokens: tuple[int, ...]
    """New tokens, without a token of `stop_ids` that ended the request."""
    text: str
    """New text. Text that later tokens may still change is reported in a later update. Empty without a tokenizer."""
    reason: Reason | None
    """Reason why the request has ended; None if it has not ended."""
    error: str | None = None
    """Error message, with the reason "failed"."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log probability of each of `tokens`, if `SamplingOptions.logprobs` is set."""
    code: str | None = None
    """Kind of the error, with the reason "failed".

    It is "engine_failed" if a step failed on the device. If only this request failed, it is "grammar", "not_finite" (its logits had NaN or
    infinity) or "request_failed".
    """
    stop_token: int | None = None
    """The token of `stop_ids` that ended the request, with the reason "stop"; None if a stop string ended it."""
    cached_tokens: int = 0
    """In the first update: number of prompt tokens whose keys and values were taken from the prefix cache. 0 in later updates."""
    stop_logprob: float | None = None
    """Log probability of `stop_token`, if `SamplingOptions.logprobs` is set."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of prompt tokens that were not in an earlier update, if `SamplingOptions.prompt_logprobs` is set.

    The first token of a prompt has no log probability.
    """

    @property
    def details(self) -> dict[str, Any]:
        """The fields that have a value, as JSON for messages between processes of a server. Without `number`, `tokens` and `text`."""
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
    """The output of one request. The request ends after a token of `stop_ids`, or when its text has one of `stop_strings`.

    `stream` makes text of tokens; it is None for an engine without a tokenizer. `reports_steps` says whether there is an update after each
    step, or only one at the end.
    """

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
        """The state of the request's grammar after the tokens so far; None without a grammar."""
        self.reports_steps = reports_steps
        self.stop_ids = frozenset(stop_ids)
        self._stream = stream
        self._stops = StopStrings(StringSearch(stop_strings))
        self._tokens: list[int] = []
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self._early = sampling.min_tokens
        """Until this many further tokens are added, no stop string ends the text (`SamplingOptions.min_tokens`)."""
        self._stop_token: int | None = None
        self._stop_logprob: float | None = None
        self._prompt_logprobs: PromptLogprobs | None = None
        self.scored = 0
        """First prompt position whose logits are still needed for log probabilities of the prompt. It grows when a step is launched."""
        self._cached: int | None = None
        """Number of prompt tokens from the prefix cache. None before it is known, 0 after it is reported."""

    def note_cached(self, tokens: int) -> None:
        """Set the number of prompt tokens from the prefix cache. Only the first call has an effect, not calls after a preemption."""
        if self._cached is None:
            self._cached = tokens

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Add the log probabilities of the next prompt tokens. Raises NotFinite if one of them is NaN."""
        if not logprobs.finite:
            raise NotFinite
        if self._prompt_logprobs is None:
            self._prompt_logprobs = logprobs
        else:
            self._prompt_logprobs.extend(logprobs)

    def add(self, token: int, logprob: TokenLogprob | None = None) -> bool:
        """Add the next token. Returns whether it ends the request. Raises NotFinite if the token is negative."""
        if token < 0:  # `sampling.mark_not_finite` gives -1 where the logits have NaN or infinity.
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
        """Add the first new tokens of a request that goes on from another engine. They are not reported again.

        Raises BadInput if the tokens end the request.
        """
        if any(self.add(token) for token in tokens):
            raise BadInput("the new tokens that are given end the text")
        self._tokens = []
        self._text = ""
        self._logprobs = []
        if tokens:
            self._cached = 0

    def add_drafted(self, new: Sequence[tuple[int, TokenLogprob | None]]) -> tuple[list[int], bool]:
        """Add the new tokens of a step with drafts, up to the first token that ends the request.

        Returns the tokens that were added, and whether the last of them ends the request.
        """
        taken = []
        for token, logprob in new:
            taken.append(token)
            if self.add(token, logprob):
                return taken, True
        return taken, False

    def update(self, number: int, reason: Reason | None = None, failure: RequestFailure | None = None) -> Update:
        """Return the output since the last update. With a `reason` this is the last update.

        The last update also has the text that was kept back because later tokens could have changed it.
        """
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
