"""Request for text, as the engine takes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.serve.grammar import Grammar
from meshwright.serve.sampling_options import GREEDY, SamplingOptions


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A request for at most `new_tokens` tokens after a prompt."""

    prompt: Sequence[int]
    """Token ids."""
    new_tokens: int
    sampling: SamplingOptions = GREEDY
    stop_ids: Collection[int] = ()
    """Tokens that end the text, with the reason "stop"."""
    stop_strings: Sequence[str] = ()
    """The text ends before the first of these, with the reason "stop"."""
    priority: int = 0
    """Requests of a larger number go first; a level is worth as many seconds as `BatchLimits.priority_seconds`."""
    salt: str = ""
    """Only requests of equal salt share cached blocks."""
    seconds: float | None = None
    """Time from now after which it ends with the reason "deadline"."""
    samples_of: int | None = None
    """Number of an earlier request with the same prompt, whose cache it shares."""
    given: Sequence[int] = ()
    """New tokens that are known already: the text goes on after them, and updates do not repeat them."""
    continued_elsewhere: bool = False
    """Whether another engine continues the text: the block with the end of the prompt is kept for it, even if it is not full."""
    grammar: Grammar | None = None
    """Grammar that the text follows; it ends at a token of `stop_ids` once the grammar allows one."""
    reports_steps: bool = True
    """Whether each step's tokens are reported. Otherwise one update has all of them, at the end: less work for the host."""

    def to_plain(self) -> dict[str, Any]:
        """The request in values of JSON."""
        return {**asdict(self), "stop_ids": list(self.stop_ids)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> TextRequest:
        """The request of `to_plain`, also after JSON has made its keys text."""
        fields = dict(values)
        sampling = SamplingOptions.from_plain(fields.pop("sampling"))
        grammar = fields.pop("grammar")
        return cls(**fields, sampling=sampling, grammar=None if grammar is None else Grammar(**grammar))
