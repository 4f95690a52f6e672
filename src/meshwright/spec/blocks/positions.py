"""Rotary positions, and ways to scale their frequencies for longer sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from meshwright.spec.errors import WrongKey
from meshwright.spec.fields import Bound, Positive

Pairs = Literal["halves", "neighbours"]
"""Which elements of a rotated part are rotated together: i and i + width / 2, or 2i and 2i + 1."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotary frequencies by a factor (Hugging Face `rope_type: llama3` and `linear`)."""

    kind: Literal["llama3", "linear"] = "llama3"
    """llama3: by wavelength, as in Llama 3.1. linear: all frequencies alike (Chen et al. 2023); it uses only `factor`.
    """

    factor: Annotated[float, Bound(at_least=1)] = 8.0
    """How much longer than the original context the scaled one is."""
    low_freq_factor: Annotated[float, Bound(more_than=0)] = 1.0
    """Wavelengths above original_max_seq_len / low_freq_factor are fully scaled."""
    high_freq_factor: Annotated[float, Bound(more_than=0)] = 4.0
    """Wavelengths below original_max_seq_len / high_freq_factor are not scaled."""
    original_max_seq_len: Positive = 8192
    """Context length before scaling, in tokens."""


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN scaling of RoPE (Peng et al. 2023), with DeepSeek's two factors of attention scores."""

    factor: Annotated[float, Bound(at_least=1)] = 40.0
    """How much longer than the original context the scaled one is."""
    original_max_seq_len: Positive = 4096
    """Context length before scaling, in tokens."""
    beta_fast: Annotated[float, Bound(more_than=0)] = 32.0
    """Frequencies with more turns than this over the original context are not scaled."""
    beta_slow: Annotated[float, Bound(more_than=0)] = 1.0
    """Frequencies with fewer turns than this over the original context are fully scaled."""
    mscale: Annotated[float, Bound(at_least=0)] = 1.0
    """The rotated part of queries and keys is multiplied by (0.1 · mscale · log(factor) + 1), and divided by the same
    with `mscale_all_dim`.
    """
    mscale_all_dim: Annotated[float, Bound(at_least=0)] = 1.0
    """Attention scores are multiplied by (0.1 · mscale_all_dim · log(factor) + 1)²; 0 is a factor of 1."""
    attention_factor: Annotated[float, Bound(at_least=0)] = 0.0
    """Factor of the rotated part of queries and keys; 0 is the factor that `mscale` and `mscale_all_dim` give."""
    truncate: bool = True
    """Whether the limits between scaled, interpolated and unscaled dimensions are rounded to whole dimensions; false
    for gpt-oss.
    """

    @property
    def rotary_scale(self) -> float:
        """Return the factor of the cosines and sines by which queries and keys are rotated."""
        return self.attention_factor or self._growth(self.mscale) / self._growth(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        """Return the factor of attention scores."""
        return self._growth(self.mscale_all_dim) ** 2

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE scaling (Ding et al. 2024): each frequency has a divisor of its own, one for short sequences and one for
    long sequences.

    A run uses one of the two lists for all tokens, because keys that are rotated with one list do not fit queries that
    are rotated with the other.
    """

    short_factor: tuple[float, ...]
    """Divisors of the frequencies if sequences have at most `original_max_seq_len` tokens."""
    long_factor: tuple[float, ...]
    """Divisors of the frequencies if sequences are longer."""
    factor: Annotated[float, Bound(at_least=1)] = 32.0
    """How much longer than the original context the scaled one is."""
    original_max_seq_len: Positive = 4096
    """Context length before scaling, in tokens."""
    attention_factor: Annotated[float, Bound(at_least=0)] = 0.0
    """Factor of the rotated part of queries and keys; 0 is √(1 + log(factor) / log(original_max_seq_len))."""

    @property
    def rotary_scale(self) -> float:
        """Return the factor of the cosines and sines by which queries and keys are rotated."""
        return self.attention_factor or math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_seq_len))

    def divisors(self, length: int) -> tuple[float, ...]:
        """Return the divisors of the frequencies for a run whose longest sequence has `length` tokens."""
        return self.long_factor if length > self.original_max_seq_len else self.short_factor


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """Rotary embedding of the first `width` elements of each query and key head."""

    width: int
    """Number of rotated elements of a head."""
    base: float
    """Base of the rotary frequencies."""
    scaling: RopeScaling | YarnScaling | LongRopeScaling | None = None
    """How frequencies are scaled for longer sequences; None does not scale them."""
    pairs: Pairs = "halves"
    query_growth: float = 0.0
    """Queries at position p are multiplied by 1 + query_growth · log(1 + ⌊p / original_max_seq_len⌋), with YaRN's original context."""

    @property
    def growth_length(self) -> int:
        """Return the number of positions after which queries begin to grow (`query_growth`); 0 if they do not grow."""
        return self.scaling.original_max_seq_len if self.query_growth and isinstance(self.scaling, YarnScaling) else 0

    def mistakes(self) -> Iterator[WrongKey]:
        """Yield what is wrong with the scaling. Mistakes name keys of `model`."""
        scaling = self.scaling
        if self.query_growth and not isinstance(scaling, YarnScaling):
            expected = "0 without yarn, whose original_max_seq_len it needs"
            yield WrongKey("query_growth", f"{self.query_growth:g}", expected, "0")
        if isinstance(scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                factors = getattr(scaling, name)
                if len(factors) != self.width // 2 or min(factors, default=0) <= 0:
                    expected = f"{self.width // 2} positive numbers, one for each rotated pair"
                    found = f"{len(factors)} numbers, the smallest {min(factors, default=0):g}"
                    yield WrongKey(f"longrope.{name}", found, expected)
        if not isinstance(scaling, RopeScaling):
            return
        if scaling.kind == "linear" and scaling != RopeScaling(kind="linear", factor=scaling.factor):
            yield WrongKey("rope_scaling", "linear with keys beside factor", "none of them with kind: linear")
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            yield WrongKey(
                "rope_scaling.high_freq_factor",
                f"{scaling.high_freq_factor:g}",
                f"more than rope_scaling.low_freq_factor ({scaling.low_freq_factor:g})",
            )
