"""Unpacks stored weights of few bits and multiplies them by their scales, in torch on any device.

Bytes are little-endian, as in the folders: a 32-bit word is four bytes, whose low bits come first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.spec.weight_scheme import AWQ_ORDER, NUMBERS


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` unsigned numbers of `bits` bits, 4 or 8, in each row of 32-bit words: `(rows, count)` uint8."""
    if words.stride(-1) != 1:  # `contiguous` leaves strides of dimensions of size 1
        words = words.clone(memory_format=torch.contiguous_format)
    numbers = words.contiguous().view(torch.uint8)
    return (nibbles(numbers) if bits == 4 else numbers)[..., :count]


def nibbles(numbers: Tensor, *, high_first: bool = False) -> Tensor:
    """The halves of each byte `(…, n)` as `(…, 2 · n)` uint8, the low one first unless told otherwise."""
    low = numbers & 15
    high = numbers >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def in_output_order(numbers: Tensor) -> Tensor:
    """AWQ's order of the eight outputs in a word undone, for numbers `(…, outputs)` in the order of their bits."""
    places = [AWQ_ORDER.index(output) for output in range(len(AWQ_ORDER))]
    return numbers.unflatten(-1, (-1, len(AWQ_ORDER)))[..., places].flatten(-2)


def small_floats(indices: Tensor) -> Tensor:
    """e2m1 numbers, one in each element of `indices`, in fp32."""
    half = NUMBERS["e2m1"]
    table = torch.tensor((*half, *(-number for number in half)), device=indices.device)
    return table[indices.int()]


def powers_of_two(exponents: Tensor) -> Tensor:
    """2^(e - 127) in fp32, of uint8 `exponents` or e8m0 numbers; NaN for 255, as in e8m0."""
    if exponents.dtype == torch.uint8:
        exponents = exponents.view(torch.float8_e8m0fnu)
    return exponents.float()


def scaled(numbers: Tensor, zeros: Tensor | None, scale: Tensor, width: int, index: Tensor | None = None) -> Tensor:
    """(numbers - zeros) · scale in fp32, for numbers `(rows, inputs)`, zeros and scale `(rows, groups)` of `width` inputs each.

    The last group may be shorter. `index` `(inputs,)` gives the group of each input instead, below the number of groups.
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
    """Rows [first, last) of a weight's scales, of a grid whose first row begins at or before `first` and has `height` rows of the weight.

    Row 0 of `grid` is that of row `first // height`; a height of 0 is that of all rows.
    """
    if height == 1:
        return grid
    if height == 0:
        return grid.expand(last - first, *grid.shape[1:])
    return grid[torch.arange(first, last, device=grid.device) // height - first // height]
