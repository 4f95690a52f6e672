"""How a folder stores a quantised weight: its tensors with their dtypes and shapes, and what their numbers mean. Torch-free.

A weight `(out, in)` is stored as elements of a few bits, packed into the bytes of one tensor, and scales, each shared by a rectangle of the
weight. A value is `(element - zero point) · scale`. With a factor for the whole tensor all scales are multiplied or divided by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from meshwright.spec.engine import WeightFormat

Element = Literal["e4m3", "int8", "int4", "e2m1", "map"]
"""What a stored number means: a float of 8 or 4 bits, an integer, or an index into a table in the folder (nf4)."""
Packing = Literal["plain", "words", "bytes", "input words", "output words", "blocks", "flat"]
"""How numbers stand in a tensor, all with the lowest bits first but `flat`:

- `plain`: one each, `(out, in)`;
- `words`: neighbouring inputs in 32 bits, `(out, in · bits / 32)`;
- `bytes`: two inputs in a byte, `(out, in / 2)`;
- `input words`: neighbouring inputs in 32 bits, transposed, `(in · bits / 32, out)`; scales `(groups, out)` (GPTQ);
- `output words`: eight outputs in 32 bits in the order `AWQ_ORDER`, `(in, out / 8)`; scales `(groups, out)` (AWQ);
- `blocks`: of all experts, 16 bytes with 32 inputs each, `(experts, out, in / 32, 16)` (gpt-oss);
- `flat`: two in a byte, the first in its high bits, `(out · in / 2, 1)` (bitsandbytes).
"""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each 4 bits of a word, lowest first."""
WORD_BITS = 32
BITS: dict[Element, int] = {"e4m3": 8, "int8": 8, "int4": 4, "e2m1": 4, "map": 4}
NUMBERS: dict[Element, tuple[float, ...]] = {"e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)}
"""Values of the elements that have a table; the highest bit is the sign."""
FP8_BLOCK = 128
"""Outputs and inputs of a weight that share a scale, and numbers of a token that do, in the format `fp8 blocks`."""
LayerFormat = Literal["fp8", "int8", "fp8 blocks"]
"""How a layer multiplies in 8 bits: with a scale for each token and each output, or, `fp8 blocks`, with one for each 128 numbers of a token
and each block of 128 × 128 of the weight."""
NUMBERS_OF: dict[LayerFormat, WeightFormat] = {"fp8": "fp8", "int8": "int8", "fp8 blocks": "fp8"}
"""The format of the numbers of a layer."""
ROUNDING_LOSS: dict[LayerFormat, float] = {"fp8": 0.026, "int8": 0.008, "fp8 blocks": 0.026}
"""Root mean square error of normally distributed weights rounded with the scales of a format, over their own."""
MAP_SIZE = 16
NESTED_BLOCK = 256
ABSMAX_BLOCK = 64
"""Numbers in the table of a `map`; its scales in 8 bits that share a scale, and weights that share one, where the folder does not say."""


class StoredTensor(NamedTuple):
    """A tensor of a stored weight: the dtypes that it may have, in safetensors' names, and the shapes."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False


FLOAT_SCALES = ("F32", "BF16", "F16")
POWERS = ("U8", "F8_E8M0")
"""dtypes of scales that are powers of two, as an exponent."""


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """One way to store a quantised weight."""

    name: str
    """In messages."""
    element: Element
    packing: Packing = "plain"
    values: str = ".weight"
    """How the name of the tensor of elements ends, in place of the `.weight` of an unquantised one; so for the further names."""
    scales: tuple[str, ...] = (".weight_scale",)
    """Names of the scales; a folder has one of them."""
    scale_dtypes: tuple[str, ...] = FLOAT_SCALES
    block: tuple[int, int] = (1, 0)
    """Outputs and inputs that share a scale; 0 is all of them. `(0, 0)` is a scale for the tensor, `(1, 0)` for each output."""
    zeros: str | None = None
    """Zero points, packed as the values are, or as plain int8; without them integers are symmetric."""
    zero_offset: int = 0
    """Added to stored zero points, within the bits of an element: 1 in GPTQ's first format."""
    factor: str | None = None
    """A number by which all scales are multiplied."""
    divides: bool = False
    """Whether scales are divided by the factor instead."""
    index: str | None = None
    """The group of each input (`desc_act`); optional."""
    shape_name: str | None = None
    """A tensor with the weight's shape."""
    inputs: tuple[str, ...] = ()
    """Names that a static scale of activations may have; optional."""
    activations: WeightFormat | None = None
    """8-bit format of activations; None leaves them in the model's dtype."""

    @property
    def bits(self) -> int:
        return BITS[self.element]

    @property
    def native(self) -> LayerFormat | None:
        """The format in which the engine multiplies by stored numbers and scales as they are; None if it does not."""
        found: dict[Element, WeightFormat] = {"e4m3": "fp8", "int8": "int8"}
        number_format = found.get(self.element)
        if self.packing != "plain" or self.zeros is not None or self.powers or number_format != self.activations:
            return None
        if self.block == (FP8_BLOCK, FP8_BLOCK):
            return "fp8 blocks" if number_format == "fp8" else None
        return number_format if self.block in ((0, 0), (1, 0)) else None

    @property
    def powers(self) -> bool:
        """Whether scales are powers of two only."""
        return self.scale_dtypes == POWERS

    def groups(self, inputs: int) -> int:
        """Groups of inputs that share a scale."""
        return -(-inputs // self.block[1]) if self.block[1] else 1

    @lru_cache(maxsize=256)  # noqa: B019  (a folder has few schemes and shapes)
    def parts(self, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        """By the end of its name, each tensor of a weight `(out, in)`, or `(experts, out, in)` for packing `blocks`.

        Of `scales` all are there; a folder has one. Those of packing `flat` depend on the folder's own record and are not here.
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
        """The shape of the elements, and those that scales may have."""
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
        packed = -(-outputs * self.bits // WORD_BITS)
        if self.packing in ("input words", "output words"):
            return StoredTensor(("I32",), ((grid[1], packed),))
        if self.packing == "words":
            return StoredTensor(("I32",), ((packed, grid[1]),))
        return StoredTensor(("I8",), (grid, (grid[0],)) if grid[1] == 1 else (grid,))
