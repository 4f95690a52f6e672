"""Unpacks stored weights of 4 or 8 bits and multiplies them by their scales, with torch on any device.

The byte order is that of the checkpoint files, little-endian: a 32-bit word is four bytes, and the low bits come first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.spec.weight_scheme import AWQ_ORDER, NUMBERS


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` unsigned numbers in each row of 32-bit words, as `(rows, count)` uint8.

    Each number has `bits` bits, 4 or 8. `words` is `(rows, words)`.
    """
    if words.stride(-1) != 1:  # `contiguous` leaves strides of dimensions of size 1
        words = words.clone(memory_format=torch.contiguous_format)
    numbers = words.contiguous().view(torch.uint8)
    return (nibbles(numbers) if bits == 4 else numbers)[..., :count]


def nibbles(numbers: Tensor, *, high_first: bool = False) -> Tensor:
    """Return both halves of each byte `(…, n)` as `(…, 2 · n)` uint8: the low half first, or the high one with `high_first`."""
    low = numbers & 15
    high = numbers >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def in_output_order(numbers: Tensor) -> Tensor:
    """Undo AWQ's order of the eight outputs in a word, for `numbers` `(…, outputs)` in the order of their bits."""
    # places[i]: where the number of output i is stored within a word.
    places = [AWQ_ORDER.index(output) for output in range(len(AWQ_ORDER))]
    return numbers.unflatten(-1, (-1, len(AWQ_ORDER)))[..., places].flatten(-2)


def small_floats(indices: Tensor) -> Tensor:
    """Return the numbers of 4 bits (e2m1) that `indices` encode, in fp32, shaped like `indices`."""
    # The table has the 8 positive numbers and then the negative ones, because the highest bit is the sign.
    half = NUMBERS["e2m1"]
    table = torch.tensor((*half, *(-number for number in half)), device=indices.device)
    return table[indices.int()]


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) in fp32 for `exponents` e in uint8 or e8m0; 255 gives NaN, as in e8m0."""
    if exponents.dtype == torch.uint8:
        exponents = exponents.view(torch.float8_e8m0fnu)
    return exponents.float()


def scaled(numbers: Tensor, zeros: Tensor | None, scale: Tensor, width: int, index: Tensor | None = None) -> Tensor:
    """Return (numbers - zeros) · scale in fp32, shaped like `numbers` `(rows, inputs)`.

    `zeros` and `scale` are `(rows, groups)`; a group is `width` consecutive inputs, and the last group may be shorter.
    `index` `(inputs,)`, if given, has the group of each input instead.
    """
    values = numbers.float()
    inputs = numbers.shape[-1]
    groups = scale.shape[-1]
    if groups > 1 and index is None and inputs == groups * width:
        values = values.unflatten(-1, (groups, width))
        zeros = None if zeros is None else zeros[..., None]
        scale = scale[..., None]
    elif groups > 1:
        where = torch.arange(inputs, device=numbers.device) // width if index is None else index
        zeros = None if zeros is None else zeros[..., where]
        scale = scale[..., where]
    values = values if zeros is None else values - zeros
    return (values * scale).view(numbers.shape)


def for_rows(grid: Tensor, height: int, first: int, last: int) -> Tensor:
    """Return the rows of `grid` that belong to the rows `first` to last - 1 of a weight, one for each weight row.

    `height` is how many weight rows share a row of the scales; 0 means that all weight rows share one. Row 0 of `grid`
    is the row of scales of weight row `first`. With height 1 `grid` already has one row per weight row.
    """
    if height == 1:
        return grid
    if height == 0:
        return grid.expand(last - first, *grid.shape[1:])
    return grid[torch.arange(first, last, device=grid.device) // height - first // height]
