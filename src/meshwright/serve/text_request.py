"""The request that the engine's `submit` takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.serve.grammar import Grammar
from meshwright.serve.sampling_options import GREEDY, SamplingOptions


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A request for at most `new_tokens` new tokens after a prompt."""

    prompt: Sequence[int]
    """Token ids of the prompt."""
    new_tokens: int
    """Largest number of new tokens."""
    sampling: SamplingOptions = GREEDY
    """Options that decide how tokens are chosen."""
    stop_ids: Collection[int] = ()
    """A token among these ends the request, with the reason "stop"."""
    stop_strings: Sequence[str] = ()
    """If the new text has one of these strings, the request ends with the reason "stop". The text then ends before the string."""
    priority: int = 0
    """Requests with a larger number go first. A difference of 1 counts as much as an earlier arrival by `BatchLimits.priority_seconds`."""
    salt: str = ""
    """Only requests with equal salt share cached blocks."""
    seconds: float | None = None
    """The request ends after this time, counted from its submission, with the reason "deadline". None sets no limit."""
    samples_of: int | None = None
    """Number of an earlier request with the same prompt. This request waits until that prompt is computed, and shares its cache blocks."""
    given: Sequence[int] = ()
    """The first new tokens, if they are already known. The request goes on after them, and its updates do not have them."""
    continued_elsewhere: bool = False
    """Whether another engine goes on with the request. If so, the last block of the prompt is cached too, even if it is not full."""
    grammar: Grammar | None = None
    """Grammar that the new text must follow. Where the grammar allows the end, a token of `stop_ids` may end the request."""
    reports_steps: bool = True
    """Whether there is an update after each step. If not, there is one update at the end, which is less work for the host."""

    def to_plain(self) -> dict[str, Any]:
        """Return the request as JSON values."""
        return {**asdict(self), "stop_ids": list(self.stop_ids)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> TextRequest:
        """Make a request from the result of `to_plain`. It accepts the string keys that integer keys become in JSON."""
        fields = dict(values)
        sampling = SamplingOptions.from_plain(fields.pop("sampling"))
        grammar = fields.pop("grammar")
        return cls(**fields, sampling=sampling, grammar=None if grammar is None else Grammar(**grammar))
