"""Rotary positions and the scalings of their frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from meshwright.spec.fields import Bound, Positive


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

    @property
    def rotary_scale(self) -> float:
        """Factor of the rotary tables."""
        return self._growth(self.mscale) / self._growth(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        """Factor of attention scores."""
        return self._growth(self.mscale_all_dim) ** 2

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """Rotary embedding of `width` elements of each query and key head."""

    width: int
    base: float
    """Base of the rotary frequencies."""
    scaling: RopeScaling | YarnScaling | None = None

    def mistakes(self) -> Iterator[str]:
        """What is wrong with the scaling, naming keys of `model`."""
        scaling = self.scaling
        if not isinstance(scaling, RopeScaling):
            return
        if scaling.kind == "linear" and scaling != RopeScaling(kind="linear", factor=scaling.factor):
            yield "rope_scaling has keys beside factor: expected none of them with kind: linear"
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            yield (
                f"rope_scaling.high_freq_factor is {scaling.high_freq_factor:g}: expected more than low_freq_factor "
                f"({scaling.low_freq_factor:g})"
            )
