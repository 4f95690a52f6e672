"""The sampling options of a request, with checks of their ranges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeGuard

from meshwright.spec.errors import BadInput

LOWEST_TEMPERATURE = 1e-5
"""At a temperature below this value, the likeliest token is taken."""
MOST_BIASES = 1024
"""Largest number of tokens in `SamplingOptions.logit_bias`."""
MOST_ALLOWED_TOKENS = 1024
"""Largest number of ids in `SamplingOptions.allowed_token_ids`."""
MOST_BAD_WORDS = 128
"""Largest number of words in `SamplingOptions.bad_words`."""
LONGEST_BAD_WORD = 32
"""Largest number of tokens of one word in `SamplingOptions.bad_words`."""
MOST_LOGPROBS = 20
"""Largest value of `top_logprobs` and `prompt_logprobs`."""
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
_WHOLE_RANGES: Mapping[str, tuple[int, int]] = {
    "top_k": (0, 2**31 - 1),
    "seed": (0, 2**63 - 1),
    "top_logprobs": (0, MOST_LOGPROBS),
    "prompt_logprobs": (0, MOST_LOGPROBS),
    "min_tokens": (0, 2**31 - 1),
}
_BIAS_RANGE = (-100, 100)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options that decide how the next token of a request is chosen from the logits.

    They are applied in this order: repetition penalty, presence and frequency penalty, bias, excluded tokens, temperature, top-k, top-p
    (among the tokens that top-k leaves), min-p. Tokens are excluded by the request's grammar, then by `allowed_token_ids`, `bad_words` and
    `min_tokens`. If one of these three would exclude all tokens at a position, it is not applied there.

    Raises BadInput for a value that is out of range.
    """

    temperature: float = 1.0
    """The logits are divided by it. With 0, the likeliest token is taken."""
    top_k: int = 0
    """Only the `top_k` likeliest tokens may be drawn, and tokens that are as likely as the last of them. 0 allows all tokens."""
    top_p: float = 1.0
    """Only the likeliest tokens may be drawn: as few as have, added up, at least this probability. 1 allows all tokens."""
    min_p: float = 0.0
    """Only tokens with at least `min_p` times the probability of the likeliest token may be drawn. 0 allows all tokens."""
    repetition_penalty: float = 1.0
    """For tokens in the prompt or in the new text, positive logits are divided by it, and negative logits multiplied (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """It is subtracted from the logits of tokens that are in the new text."""
    frequency_penalty: float = 0.0
    """It is subtracted from the logit of a token once for each time that the token is in the new text."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """By token id: a value that is added to the token's logit."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these token ids may be drawn. None allows all tokens."""
    bad_words: Sequence[Sequence[int]] = ()
    """Words that may not be in the new text; each is a list of token ids. The last id is not drawn directly after the other ids."""
    min_tokens: int = 0
    """Until the request has this many new tokens, no stop id is drawn and no stop string ends the text."""
    seed: int = 0
    """Seed of the draws. A draw depends only on the seed, the position of the token, and the logits."""
    logprobs: bool = False
    """Whether to return the log probability of each new token, by the model before any option is applied."""
    top_logprobs: int = 0
    """For each new token, return this many of the likeliest tokens with their log probabilities. Needs `logprobs`."""
    prompt_logprobs: int | None = None
    """As `top_logprobs`, for each token of the prompt except the first. None returns no log probabilities of the prompt."""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            _check_range(name, getattr(self, name), low, high)
        for name, bounds in _WHOLE_RANGES.items():
            value = getattr(self, name)
            if value is None and name == "prompt_logprobs":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise BadInput(f"{name}: expected a whole number, got {value!r}")
            _check_range(name, value, *bounds)
        if self.top_logprobs and not self.logprobs:
            raise BadInput(f"top_logprobs: {self.top_logprobs} needs logprobs: true, or set top_logprobs to 0")
        if len(self.logit_bias) > MOST_BIASES:
            raise BadInput(f"logit_bias: expected at most {MOST_BIASES} tokens, got {len(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            _check_range(f"logit_bias of token {token}", bias, *_BIAS_RANGE)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids, MOST_ALLOWED_TOKENS)
        if not _is_list(self.bad_words) or len(self.bad_words) > MOST_BAD_WORDS:
            raise BadInput(
                f"bad_words: expected a list of at most {MOST_BAD_WORDS} words, got {_shown(self.bad_words)}"
            )
        for word in self.bad_words:
            _check_ids("bad_words", word, LONGEST_BAD_WORD)
        singles = {word[0] for word in self.bad_words if len(word) == 1}
        if self.allowed_token_ids is not None and singles.issuperset(self.allowed_token_ids):
            raise BadInput("bad_words: expected to leave one of allowed_token_ids, got all of them")

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> SamplingOptions:
        """Make options from JSON values. In JSON the keys of `logit_bias` are strings."""
        fields = dict(values)
        fields["logit_bias"] = {int(token): bias for token, bias in fields.pop("logit_bias", {}).items()}
        return cls(**fields)

    def check_tokens(self, vocab: int) -> None:
        """Check that all token ids in the options are below `vocab`. Raises BadInput if one is not."""
        named: Mapping[str, Iterable[int]] = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": chain.from_iterable(self.bad_words),
        }
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocab:
                    nearest = min(max(token, 0), vocab - 1)
                    raise BadInput(
                        f"{name}: expected token ids of 0 to {vocab - 1}, got {token}; the nearest is {nearest}"
                    )

    def sample(self, index: int) -> SamplingOptions:
        """Return the options of sample number `index` of a prompt: the same options with another seed.

        Only sample 0 returns log probabilities of the prompt.
        """
        return self if index == 0 else replace(self, seed=_mixed_seed(self.seed, index), prompt_logprobs=None)

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn at random. If not, the likeliest token is taken."""
        return self.temperature >= LOWEST_TEMPERATURE

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p may remove tokens."""
        return self.draws and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        """Whether one of the three penalties has an effect."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def follows_text(self) -> bool:
        """Whether penalties or bad words change the scores of a token depending on the tokens before it."""
        return self.penalises or any(len(word) > 1 for word in self.bad_words)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise BadInput(f"{name}: expected a number from {low} to {high}, got {value!r}")
    if not low <= value <= high:
        nearest = low if value < low else high
        raise BadInput(f"{name}: expected {low} to {high}, got {value}; the nearest valid value is {nearest}")


def _check_ids(name: str, ids: object, most: int) -> None:
    """Raise BadInput if `ids` is not a list of 1 to `most` integers."""
    if not _is_list(ids) or not 1 <= len(ids) <= most:
        raise BadInput(f"{name}: expected a list of 1 to {most} token ids, got {_shown(ids)}")
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int):
            raise BadInput(f"{name}: expected token ids, got {id!r}")


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _shown(value: object) -> str:
    return str(len(value)) if _is_list(value) else repr(value)[:40]


def _mixed_seed(seed: int, index: int) -> int:
    """Return a seed of 63 bits for sample `index`, by the finalizer of SplitMix64 (Steele et al. 2014)."""
    mask = 2**64 - 1
    x = (seed + index * 0x9E3779B97F4A7C15) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x ^ x >> 31) >> 1


GREEDY = SamplingOptions(temperature=0.0)
