"""How a folder stores a quantised weight: its tensors with their dtypes and shapes, and what their numbers mean.

Without torch.

A weight of shape (out, in) is stored as elements of a few bits, which are packed into one tensor, and as scales. Each
scale belongs to a rectangle of the weight. The value of an element is `(element - zero point) · scale`. If there is a
factor for the whole tensor, all scales are multiplied or divided by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from meshwright.spec.engine import WeightFormat

Element = Literal["e4m3", "int8", "int4", "e2m1", "map"]
"""What a stored number means: a float of 8 bits (e4m3) or 4 bits (e2m1), an integer, or an index into a table in the
folder (map, for nf4).
"""
Packing = Literal["plain", "words", "bytes", "input words", "output words", "blocks", "flat"]
"""How numbers are packed in a tensor. Except for `flat`, the first number has the lowest bits.

- `plain`: one number per element, `(out, in)`;
- `words`: neighbouring inputs in 32 bits, `(out, in · bits / 32)`;
- `bytes`: two inputs in a byte, `(out, in / 2)`;
- `input words`: neighbouring inputs in 32 bits, transposed, `(in · bits / 32, out)`; scales `(groups, out)` (GPTQ);
- `output words`: eight outputs in 32 bits in the order `AWQ_ORDER`, `(in, out / 8)`; scales `(groups, out)` (AWQ);
- `blocks`: all experts together, 16 bytes with 32 inputs each, `(experts, out, in / 32, 16)` (gpt-oss);
- `flat`: two numbers in a byte, the first in its high bits, `(out · in / 2, 1)` (bitsandbytes).
"""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Number of the output in each 4 bits of a word, the lowest bits first."""
WORD_BITS = 32
"""Bits of a word."""
BITS: dict[Element, int] = {"e4m3": 8, "int8": 8, "int4": 4, "e2m1": 4, "map": 4}
"""Bits of an element."""
NUMBERS: dict[Element, tuple[float, ...]] = {"e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)}
"""Values of the elements that have a fixed table. The highest bit of an element is the sign."""
FP8_BLOCK = 128
"""Number of outputs, and of inputs, of a weight that share a scale in the format `fp8 blocks`; also the numbers of a
token that share one.
"""
LayerFormat = Literal["fp8", "int8", "fp8 blocks"]
"""How a layer multiplies in 8 bits.

`fp8` and `int8`: one scale for each token and for each output. `fp8 blocks`: one scale for each 128 numbers of a token,
and for each block of 128 × 128 of the weight.
"""
NUMBERS_OF: dict[LayerFormat, WeightFormat] = {"fp8": "fp8", "int8": "int8", "fp8 blocks": "fp8"}
"""Format of a layer → format of its numbers."""
ROUNDING_LOSS: dict[LayerFormat, float] = {"fp8": 0.026, "int8": 0.008, "fp8 blocks": 0.026}
"""Root mean square error of rounded weights relative to the weights, if these are normally distributed, by format."""
MAP_SIZE = 16
"""Number of values in the table of a `map`."""
NESTED_BLOCK = 256
"""Number of 8-bit scales of a `map` that share a scale of their own, if the folder does not say."""
ABSMAX_BLOCK = 64
"""Number of weights of a `map` that share a scale, if the folder does not say."""


class StoredTensor(NamedTuple):
    """A tensor of a stored weight."""

    dtypes: tuple[str, ...]
    """dtypes that it may have, with the names of safetensors."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes that it may have."""
    optional: bool = False
    """Whether it may be missing."""


FLOAT_SCALES = ("F32", "BF16", "F16")
"""dtypes of scales that are floats."""
POWERS = ("U8", "F8_E8M0")
"""dtypes of scales that are powers of two, stored as an exponent."""


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """One way to store a quantised weight."""

    name: str
    """Its name in messages."""
    element: Element
    """What a stored number means."""
    packing: Packing = "plain"
    """How numbers are packed in the tensor of elements."""
    values: str = ".weight"
    """End of the name of the tensor of elements.

    It replaces the end `.weight` of an unquantised weight, and so do the ends below.
    """
    scales: tuple[str, ...] = (".weight_scale",)
    """Ends of the names that the tensor of scales may have. A folder has one of them."""
    scale_dtypes: tuple[str, ...] = FLOAT_SCALES
    """dtypes that the scales may have."""
    block: tuple[int, int] = (1, 0)
    """(outputs, inputs) that share a scale; 0 is all of them.

    `(0, 0)` is one scale for the tensor, `(1, 0)` one for each output.
    """
    zeros: str | None = None
    """End of the name of the zero points.

    They are packed as the values are, or plain int8. Without zero points, integers are symmetric.
    """
    zero_offset: int = 0
    """Number that is added to stored zero points, within the bits of an element: 1 in the first format of GPTQ."""
    factor: str | None = None
    """End of the name of a number by which all scales are multiplied."""
    divides: bool = False
    """Whether the scales are divided by this number instead."""
    index: str | None = None
    """End of the name of the tensor with the group of each input (`desc_act`); the tensor is optional."""
    shape_name: str | None = None
    """End of the name of a tensor with the weight's shape."""
    inputs: tuple[str, ...] = ()
    """Ends of the names that a static scale of activations may have; the tensor is optional."""
    activations: WeightFormat | None = None
    """8-bit format of activations; None leaves them in the model's dtype."""

    @property
    def bits(self) -> int:
        """Return the bits of an element."""
        return BITS[self.element]

    @property
    def native(self) -> LayerFormat | None:
        """Return the format in which the engine multiplies with the stored numbers and scales as they are.

        The result is None if it has to convert them.
        """
        found: dict[Element, WeightFormat] = {"e4m3": "fp8", "int8": "int8"}
        number_format = found.get(self.element)
        if self.packing != "plain" or self.zeros is not None or self.powers or number_format != self.activations:
            return None
        if self.block == (FP8_BLOCK, FP8_BLOCK):
            return "fp8 blocks" if number_format == "fp8" else None
        return number_format if self.block in ((0, 0), (1, 0)) else None

    @property
    def powers(self) -> bool:
        """Return whether scales can only be powers of two."""
        return self.scale_dtypes == POWERS

    def groups(self, inputs: int) -> int:
        """Return the number of groups of inputs; the inputs of a group share a scale."""
        return -(-inputs // self.block[1]) if self.block[1] else 1

    @lru_cache(maxsize=256)  # noqa: B019  (a folder has few schemes and shapes)
    def parts(self, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        """Return each tensor of a weight of shape (out, in), or (experts, out, in) with the packing `blocks`, by the
        end of its name.

        The result has all names in `scales`, of which a folder has one. It has no tensors for the packing `flat`,
        because they depend on the folder's own record.
        """
        *experts, outputs, inputs = shape
        grid = (-(-outputs // self.block[0]) if self.block[0] else 1, self.groups(inputs))
        values, scales = self._shapes(outputs, inputs, grid)
        dtype = {"plain": "F8_E4M3" if self.element == "e4m3" else "I8", "bytes": "U8", "blocks": "U8"}
        found = {self.values: StoredTensor((dtype.get(self.packing, "I32"),), ((*experts, *values),))}
        found |= {
            name: StoredTensor(self.scale_dtypes, tuple((*experts, *each) for each in scales)) for name in self.scales
        }
        if self.zeros:
            found[self.zeros] = self._zero_part(outputs, grid)
        scalar = StoredTensor(FLOAT_SCALES, ((), (1,), (1, 1)))
        if self.factor:
            found[self.factor] = scalar
        if self.index:
            found[self.index] = StoredTensor(("I32", "I64"), ((inputs,),), optional=True)
        if self.shape_name:
            found[self.shape_name] = StoredTensor(("I64", "I32"), ((2,),))
        return found | {name: scalar._replace(optional=True) for name in self.inputs}

    def _shapes(
        self, outputs: int, inputs: int, grid: tuple[int, int]
    ) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Return the shape of the elements, and the shapes that the scales may have."""
        words = -(-inputs * self.bits // WORD_BITS)
        if self.packing == "input words":
            return (words, outputs), (grid[::-1],)
        if self.packing == "output words":
            return (inputs, -(-outputs * self.bits // WORD_BITS)), (grid[::-1],)
        if self.packing == "blocks":
            return (outputs, grid[1], self.block[1] // 2), (grid,)
        size = {"plain": inputs, "words": words, "bytes": -(-inputs // 2)}[self.packing]
        short = {(1, 1): ((), (1,))}.get(grid, ((grid[0],),) if grid[1] == 1 else ())
        return (outputs, size), (grid, *short)

    def _zero_part(self, outputs: int, grid: tuple[int, int]) -> StoredTensor:
        """Return the tensor of zero points."""
        packed = -(-outputs * self.bits // WORD_BITS)
        if self.packing in ("input words", "output words"):
            return StoredTensor(("I32",), ((grid[1], packed),))
        if self.packing == "words":
            return StoredTensor(("I32",), ((packed, grid[1]),))
        return StoredTensor(("I8",), (grid, (grid[0],)) if grid[1] == 1 else (grid,))
