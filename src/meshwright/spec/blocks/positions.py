"""Rotary positions and the scalings of their frequencies."""

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
    """By wavelength as in Llama 3.1, or all frequencies alike (Chen et al. 2023), which uses `factor` only."""

    factor: Annotated[float, Bound(at_least=1)] = 8.0
    """How much longer than the original context the scaled one is."""
    low_freq_factor: Annotated[float, Bound(more_than=0)] = 1.0
    """Wavelengths above original_max_seq_len / low_freq_factor are scaled in full."""
    high_freq_factor: Annotated[float, Bound(more_than=0)] = 4.0
    """Wavelengths below original_max_seq_len / high_freq_factor are not scaled."""
    original_max_seq_len: Positive = 8192
    """Context length before scaling, in tokens."""


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN scaling of RoPE (Peng et al. 2023) with DeepSeek's two factors of attention scores."""

    factor: Annotated[float, Bound(at_least=1)] = 40.0
    """How much longer than the original context the scaled one is."""
    original_max_seq_len: Positive = 4096
    """Context length before scaling, in tokens."""
    beta_fast: Annotated[float, Bound(more_than=0)] = 32.0
    """Frequencies that turn more often than this over the original context are not scaled."""
    beta_slow: Annotated[float, Bound(more_than=0)] = 1.0
    """Frequencies that turn less often than this over the original context are scaled in full."""
    mscale: Annotated[float, Bound(at_least=0)] = 1.0
    """Growth with log(factor) of the rotated part of queries and keys, over that of `mscale_all_dim`."""
    mscale_all_dim: Annotated[float, Bound(at_least=0)] = 1.0
    """Growth with log(factor) of whole queries and keys; 0 is none."""
    attention_factor: Annotated[float, Bound(at_least=0)] = 0.0
    """Factor of the rotated part of queries and keys; 0 takes that of `mscale` and `mscale_all_dim`."""
    truncate: bool = True
    """The ends of the interpolated frequencies are rounded to whole dimensions; false for gpt-oss."""

    @property
    def rotary_scale(self) -> float:
        """Factor of the rotary tables."""
        return self.attention_factor or self._growth(self.mscale) / self._growth(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        """Factor of attention scores."""
        return self._growth(self.mscale_all_dim) ** 2

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE scaling (Ding et al. 2024): every frequency has a divisor of its own, in one list for short and one for long sequences.

    A run uses one of them for all tokens: keys that are rotated with one list do not fit queries rotated with the other.
    """

    short_factor: tuple[float, ...]
    """Divisors of the frequencies where sequences are at most `original_max_seq_len` tokens long."""
    long_factor: tuple[float, ...]
    """Divisors of the frequencies where sequences are longer."""
    factor: Annotated[float, Bound(at_least=1)] = 32.0
    """How much longer than the original context the scaled one is."""
    original_max_seq_len: Positive = 4096
    """Context length before scaling, in tokens."""
    attention_factor: Annotated[float, Bound(at_least=0)] = 0.0
    """Factor of the rotated part of queries and keys; 0 takes √(1 + log(factor) / log(original_max_seq_len))."""

    @property
    def rotary_scale(self) -> float:
        """Factor of the rotary tables."""
        return self.attention_factor or math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_seq_len))

    def divisors(self, length: int) -> tuple[float, ...]:
        """The divisors of the frequencies in a run whose longest sequence has `length` tokens."""
        return self.long_factor if length > self.original_max_seq_len else self.short_factor


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """Rotary embedding of the first `width` elements of each query and key head."""

    width: int
    base: float
    """Base of the rotary frequencies."""
    scaling: RopeScaling | YarnScaling | LongRopeScaling | None = None
    pairs: Pairs = "halves"
    query_growth: float = 0.0
    """Queries at position p are multiplied by 1 + query_growth · log(1 + ⌊p / original_max_seq_len⌋), with YaRN's original context."""

    @property
    def growth_length(self) -> int:
        """The positions after which queries first grow; 0 if they do not."""
        return self.scaling.original_max_seq_len if self.query_growth and isinstance(self.scaling, YarnScaling) else 0

    def mistakes(self) -> Iterator[WrongKey]:
        """What is wrong with the scaling, naming keys of `model`."""
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
