"""Rotary position embedding (Su et al. 2021), with these frequency scalings: Llama 3.1, YaRN, LongRoPE, linear.

The tables of cosines and sines are computed once per forward and passed to every layer. They are not buffers of a module,
so that a model on the meta device has no tables to fill.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.kernels.norm import accumulate_dtype
from meshwright.spec.blocks.positions import LongRopeScaling
from meshwright.spec.model import RopeScaling, YarnScaling

RotaryTables = tuple[Tensor, ...]
"""Cosines and sines. In models whose queries grow with the position, a third tensor has the factors of the queries."""
Scaling = RopeScaling | YarnScaling | LongRopeScaling | None


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: Scaling, dtype: torch.dtype, *, length: int = 0
) -> RotaryTables:
    """Return cosines and sines, each `(batch or 1, seq, 1, head_dim / 2)`, for positions `(batch, seq)` or `(seq,)`.

    They are computed and returned in fp32, or in fp64 when the model's `dtype` is fp64. In fp32 the operations are those of
    transformers, so that the tables are bit-identical. At late positions a different rounding of a frequency would change
    the angle. `length` is the length of the longest sequence; with LongRoPE it selects one of the two lists of divisors.
    """
    wide = accumulate_dtype(dtype)
    frequencies = _frequencies(head_dim, theta, scaling, wide, positions.device, length)
    angles = positions.to(wide)[..., None] * frequencies
    angles = angles.reshape(-1, positions.shape[-1], 1, head_dim // 2)
    if isinstance(scaling, YarnScaling | LongRopeScaling) and scaling.rotary_scale != 1:
        return angles.cos() * scaling.rotary_scale, angles.sin() * scaling.rotary_scale
    return angles.cos(), angles.sin()


def query_factors(positions: Tensor, growth: float, length: int, dtype: torch.dtype) -> Tensor:
    """Return the factors of queries `(batch or 1, seq, 1, 1)` in `dtype`: 1 + growth · log(1 + ⌊position / length⌋).

    `positions` are those of `rotary_tables`.
    """
    wide = positions.to(accumulate_dtype(dtype)).reshape(-1, positions.shape[-1], 1, 1)
    return (1 + growth * torch.log(1 + torch.floor(wide / length))).to(dtype)


def rotate(x: Tensor, tables: RotaryTables) -> Tensor:
    """Return x `(batch, seq, heads, head_dim)` with each pair of dimensions (i, i + width / 2) rotated, in the dtype of x.

    `width` is twice the last dimension of the tables. Only the first `width` numbers of a head are rotated. The
    multiplications are computed in the dtype of the tables.
    """
    rotated, rest = _parts(x, tables)
    first, second = rotated.chunk(2, dim=-1)
    return _joined(_rotated(first, second, tables).to(x.dtype), rest)


def rotate_neighbours(x: Tensor, tables: RotaryTables) -> Tensor:
    """Return `rotate` for weights whose pairs are neighbours (2i, 2i + 1), as in DeepSeek's models.

    The result has the order of `rotate`: pairs (i, i + width / 2).
    """
    rotated, rest = _parts(x, tables)
    first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1)
    return _joined(_rotated(first, second, tables).to(x.dtype), rest)


ROTATIONS = {"halves": rotate, "neighbours": rotate_neighbours}
"""The function that rotates each kind of pairs (`spec.blocks.positions.Pairs`)."""


def _parts(x: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor | None]:
    """Return the rotated part of each head in the dtype of the tables, and the rest of the head, or None."""
    width = 2 * tables[0].shape[-1]
    if width == x.shape[-1]:
        return x.to(tables[0].dtype), None
    return x[..., :width].to(tables[0].dtype), x[..., width:]


def _joined(rotated: Tensor, rest: Tensor | None) -> Tensor:
    return rotated if rest is None else torch.cat((rotated, rest), dim=-1)


def _rotated(first: Tensor, second: Tensor, tables: RotaryTables) -> Tensor:
    cos, sin = tables[:2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _frequencies(
    head_dim: int, theta: float, scaling: Scaling, dtype: torch.dtype, device: torch.device, length: int
) -> Tensor:
    """Return the radians per token of each pair of dimensions, `(head_dim / 2,)`."""
    exponents = torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim
    if isinstance(scaling, LongRopeScaling):
        return 1.0 / (torch.tensor(scaling.divisors(length), dtype=dtype, device=device) * theta**exponents)
    frequencies = 1.0 / (theta**exponents)
    if isinstance(scaling, YarnScaling):
        return _yarn(frequencies, scaling, head_dim, theta)
    if scaling is None or scaling.kind == "linear":
        return frequencies if scaling is None else frequencies / scaling.factor
    return _scaled(frequencies, scaling)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return frequencies with Llama 3.1's scaling (Grattafiori et al. 2024 §3.4).

    Long wavelengths are stretched by `factor`, short wavelengths stay, and wavelengths in between are interpolated.
    """
    # `turns`: how often a pair rotates over the original context. `keep`: the part of the original frequency that stays.
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_seq_len / wavelengths
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def _yarn(frequencies: Tensor, scaling: YarnScaling, head_dim: int, theta: float) -> Tensor:
    """Return frequencies with YaRN's scaling (Peng et al. 2023, §3.2).

    Slow pairs are divided by `factor`, fast pairs stay, and pairs in between are interpolated. With `truncate` the
    interpolated range ends at whole numbers of pairs.
    """

    def dimension(turns: float) -> float:
        """Return the (fractional) index of the pair that makes this many turns over the original context."""
        return head_dim * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.beta_fast)
    high = dimension(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    # `scaled`: 0 for fast pairs (index up to `low`), 1 for slow pairs (from `high` on), linear in between.
    pairs = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    scaled = ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * scaled + frequencies * (1 - scaled)
