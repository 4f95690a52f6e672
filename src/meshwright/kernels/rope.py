"""Rotary position embedding (Su et al. 2021), with the frequency scalings of Llama 3.1 and of YaRN, and linear scaling.

The tables are computed once per forward and passed to every layer. They are not buffers, so a model on the meta device
has none to fill.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.kernels.norm import accumulate_dtype
from meshwright.spec.model import RopeScaling, YarnScaling

RotaryTables = tuple[Tensor, Tensor]
Scaling = RopeScaling | YarnScaling | None


def rotary_tables(positions: Tensor, head_dim: int, theta: float, scaling: Scaling, dtype: torch.dtype) -> RotaryTables:
    """Cosines and sines, each `(batch or 1, seq, 1, head_dim / 2)`, for positions `(batch, seq)` or `(seq,)`.

    Computed and returned in fp32, or fp64 when the model's `dtype` is fp64. In fp32 the operations are
    those of transformers, so that the tables are bit-identical also at late positions, where a different rounding of a
    frequency changes the angle.
    """
    wide = accumulate_dtype(dtype)
    frequencies = _frequencies(head_dim, theta, scaling, wide, positions.device)
    angles = positions.to(wide)[..., None] * frequencies
    angles = angles.reshape(-1, positions.shape[-1], 1, head_dim // 2)
    if isinstance(scaling, YarnScaling) and scaling.rotary_scale != 1:
        return angles.cos() * scaling.rotary_scale, angles.sin() * scaling.rotary_scale
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: RotaryTables) -> Tensor:
    """Return x `(batch, seq, heads, head_dim)` with each pair of dimensions (i, i + head_dim / 2) rotated, in the dtype of x.

    The products are computed in the dtype of the tables.
    """
    first, second = x.to(tables[0].dtype).chunk(2, dim=-1)
    return _rotated(first, second, tables).to(x.dtype)


def rotate_neighbours(x: Tensor, tables: RotaryTables) -> Tensor:
    """As `rotate`, of the pairs (2i, 2i + 1) that DeepSeek's weights produce; the result has pairs (i, i + head_dim / 2)."""
    first, second = x.to(tables[0].dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return _rotated(first, second, tables).to(x.dtype)


def _rotated(first: Tensor, second: Tensor, tables: RotaryTables) -> Tensor:
    cos, sin = tables
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _frequencies(head_dim: int, theta: float, scaling: Scaling, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians per token of each pair of dimensions, `(head_dim / 2,)`."""
    exponents = torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim
    frequencies = 1.0 / (theta**exponents)
    if isinstance(scaling, YarnScaling):
        return _yarn(frequencies, scaling, head_dim, theta)
    if scaling is None or scaling.kind == "linear":
        return frequencies if scaling is None else frequencies / scaling.factor
    return _scaled(frequencies, scaling)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling (Grattafiori et al. 2024 §3.4).

    Long wavelengths are stretched by `factor`, short wavelengths stay, and those in between are interpolated.
    """
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_seq_len / wavelengths
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def _yarn(frequencies: Tensor, scaling: YarnScaling, head_dim: int, theta: float) -> Tensor:
    """YaRN's scaling (Peng et al. 2023, §3.2) with the bounds of the interpolated range rounded to whole dimensions."""

    def dimension(turns: float) -> float:
        """The pair of dimensions that turns so often over the original context."""
        return head_dim * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), head_dim - 1)
    pairs = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    scaled = ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * scaled + frequencies * (1 - scaled)
