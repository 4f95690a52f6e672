"""Formats of optimizer state that is copied between host and device. They use integer arithmetic, so every device gives the same bits.

An fp32 master weight is divided into two parts. On the device is its bf16 value, rounded to nearest with ties to even, as torch rounds. In
the record is a remainder of 16 bits. An even bf16 value has 65,537 possible remainders, because ties on both sides are rounded to it. So
one more bit is needed, which says that a tie was rounded down. It is kept in the sign of the second moment, which is never negative. Only
two things are lost: the payload of NaNs and, with 8-bit moments, the last bit of such ties.

Moments are fp32, bf16, or 8 bits in blocks of `BLOCK` elements. The narrow formats round stochastically: random bits are added below the
last bit that is kept. The random bits are a function of the update's number and the element's position, so a restart repeats them. A value
that a format represents exactly keeps its bits when it is packed again. Methods: Kalamkar et al. 2019 (bf16), Dettmers et al. 2022 (blocks
of 8 bits), Zamirai et al. 2020 (16-bit remainder and stochastic rounding).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.spec.optimizers import MOMENTS
from meshwright.spec.plan import Moments

BLOCK = 256
"""Number of elements in a block of 8-bit moments. The exponents of a block are relative to the largest exponent in it."""
MASTER = "weight"
SCALE = "_scale"
"""End of the name of the field that has the largest exponent of each block of a moment."""
LEVELS = {MOMENTS[0]: 15, MOMENTS[1]: 31}
"""Highest exponent code of 8-bit moments. The first moment has a sign and 4 bits of exponent, the second 5; both have 3 mantissa bits."""
SECOND_MOMENT_SEED = 0x5BD1E995
NEAREST = {"bf16": 1 << 15, "int8": 1 << 19}
"""Constant that replaces the random bits to round to the nearest value, with ties away from zero."""
INFINITY = 0x7F800000
"""The bits of an infinite fp32 value."""
_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class ChunkPacking:
    """The format of a chunk's record in host memory.

    With `master` the record has the remainders of fp32 master weights. Without `master` and with fp32 moments it has the unchanged moments,
    in the dtype `stored`.
    """

    master: bool
    moments: Moments = "fp32"
    stored: torch.dtype = torch.float32

    @property
    def plain(self) -> bool:
        """Whether a record has the moments unchanged and nothing else, so that it can be updated without unpacking."""
        return not self.master and self.moments == "fp32"

    @property
    def tie_bits(self) -> bool:
        """Whether the second moment has the bit for ties. In 8 bits it has not, and a tie rounded down loses the master's last bit."""
        return self.master and self.moments != "int8"

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the state tensors whose values a record has."""
        return (*MOMENTS, MASTER) if self.master else tuple(MOMENTS)

    def bytes(self, size: int) -> int:
        """Return the number of bytes of a record of `size` elements; `size` is a multiple of `BLOCK`."""
        return sum(dtype.itemsize * size // per for _, dtype, per in self._fields)

    def fields(self, record: Tensor, size: int) -> dict[str, Tensor]:
        """Return views of a record (uint8) of `size` elements, by field."""
        views = {}
        start = 0
        for name, dtype, per in self._fields:
            end = start + dtype.itemsize * size // per
            views[name] = record[start:end].view(dtype)
            start = end
        return views

    @property
    def _fields(self) -> list[tuple[str, torch.dtype, int]]:
        """Name, dtype and elements per item of each field. The widest field comes first, so that all fields are aligned."""
        dtype = {"fp32": self.stored, "bf16": torch.int16, "int8": torch.uint8}[self.moments]
        moments = [(name, dtype, 1) for name in MOMENTS]
        scales = [(name + SCALE, torch.uint8, BLOCK) for name in MOMENTS] if self.moments == "int8" else []
        master = [(MASTER, torch.int16, 1)] if self.master else []
        return [*master, *moments, *scales] if self.moments == "int8" else [*moments, *master]


def unpack(
    packing: ChunkPacking, fields: Mapping[str, Tensor], rounded: Tensor | None, outputs: Mapping[str, Tensor]
) -> None:
    """Write the fp32 moments of a record to `outputs`, and also the master weights if their bf16 values `rounded` are given."""
    for name in MOMENTS:
        outputs[name].copy_(moment_of(packing, name, fields))
    if rounded is not None:
        outputs[MASTER].copy_(join_master(rounded, fields[MASTER], rounded_down_of(packing, fields)))


def pack(
    packing: ChunkPacking,
    states: Mapping[str, Tensor],
    fields: Mapping[str, Tensor],
    rounded: Tensor | None,
    seed: Tensor,
    start: int,
) -> None:
    """Write fp32 `states` to the fields of a record, and the bf16 values of the master weights to `rounded`.

    `seed` is the seed of the update (`seed_of`), `start` the position of the record's first element.
    """
    for name in MOMENTS:
        random: Tensor | int = 0
        if packing.moments != "fp32":
            positions = torch.arange(start, start + states[name].numel(), device=seed.device)
            random = random_bits(positions, seed if name == MOMENTS[0] else seed ^ SECOND_MOMENT_SEED).to(torch.int32)
        put_moment(packing, name, states[name], fields, random)
    if rounded is not None:
        put_master(packing, states[MASTER], fields, rounded)


def seed_of(updates: Tensor) -> Tensor:
    """Return the seed of an update, given the update's number (a scalar tensor); on the same device."""
    return random_bits(updates.to(torch.int64), torch.zeros_like(updates, dtype=torch.int64))


def random_bits(positions: Tensor, seed: Tensor) -> Tensor:
    """Return 32 random bits for each position, as int64: a hash of 32-bit numbers (Mueller's mixing function)."""
    x = (positions * 0x9E3779B1 + seed) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def split_master(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three parts of fp32 weights: the bf16 value, the remainder (int16), and whether a tie was rounded down (bool)."""
    bits = weight.view(torch.int32)
    last = (bits >> 16) & 1
    high = (bits + 0x7FFF + last) >> 16
    low = bits & 0xFFFF
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    high = torch.where(nan, (bits >> 16) | 0x40, high)
    low = torch.where(nan, 0, low)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16), (low == 0x8000) & (last == 0)


def join_master(rounded: Tensor, remainder: Tensor, rounded_down: Tensor) -> Tensor:
    """Return the fp32 weights that `split_master` divided into these parts."""
    high = rounded.view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32) + (rounded_down.to(torch.int32) << 16)).view(torch.float32)


def moment_of(packing: ChunkPacking, name: str, fields: Mapping[str, Tensor]) -> Tensor:
    """Return a moment of a record, in the stored dtype."""
    field = fields[name]
    second = name == MOMENTS[1]
    if packing.moments == "int8":
        return _decode_blocks(field, fields[name + SCALE], LEVELS[name])
    if packing.moments == "bf16":
        bits = field.to(torch.int32)
        return ((bits & 0x7FFF if second else bits) << 16).view(torch.float32)
    return field.abs() if second and packing.tie_bits else field


def rounded_down_of(packing: ChunkPacking, fields: Mapping[str, Tensor]) -> Tensor:
    """Return whether each master weight of a record is a tie that was rounded down (bool)."""
    second = fields[MOMENTS[1]]
    if not packing.tie_bits:
        return torch.zeros(second.shape, dtype=torch.bool, device=second.device)
    return (second.view(torch.int32) if packing.moments == "fp32" else second) < 0


def put_moment(
    packing: ChunkPacking, name: str, values: Tensor, fields: Mapping[str, Tensor], random: Tensor | int
) -> None:
    """Write a moment to a record. For the second moment this erases the tie bits: call `put_tie_bits` afterwards.

    `random` has 32 random bits (int32) for each element, or it is a constant of `NEAREST`.
    """
    if packing.moments == "fp32":
        fields[name].copy_(values)
        return
    mask = 0xFFFF if packing.moments == "bf16" else 0xFFFFF
    below = random if isinstance(random, int) else random & mask
    if packing.moments == "bf16":
        bits = values.view(torch.int32)
        # No random bits are added to a NaN, because they could carry into its sign.
        bits = torch.where((bits & 0x7FFFFFFF) > INFINITY, bits, bits + below)
        fields[name].copy_((bits >> 16).to(torch.int16))
        return
    codes, scales = _encode_blocks(values, LEVELS[name], below)
    fields[name].copy_(codes)
    fields[name + SCALE].copy_(scales)


def put_master(packing: ChunkPacking, values: Tensor, fields: Mapping[str, Tensor], rounded: Tensor) -> None:
    """Write master weights to a record and to `rounded`. The tie bits are written to the second moments of the record."""
    high, low, rounded_down = split_master(values)
    if not packing.tie_bits:
        low = torch.where(rounded_down, 0x7FFF, low)
    rounded.copy_(high)
    fields[MASTER].copy_(low)
    if packing.tie_bits:
        put_tie_bits(packing, fields, rounded_down)


def put_tie_bits(packing: ChunkPacking, fields: Mapping[str, Tensor], rounded_down: Tensor) -> None:
    """Set the signs of a record's second moments to the tie bits."""
    second = fields[MOMENTS[1]]
    bits = second.view(torch.int32) if packing.moments == "fp32" else second
    sign = torch.iinfo(bits.dtype).min
    bits.copy_((bits & ~sign) | rounded_down.to(bits.dtype) * sign)


def _encode_blocks(values: Tensor, levels: int, below: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes (exponent relative to the block's largest, 3 mantissa bits) and the largest exponent of each block, as uint8."""
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    largest = exponent.view(-1, BLOCK).amax(1)
    relative = exponent - largest.repeat_interleave(BLOCK) + levels
    code = (((relative << 23) | (magnitude & 0x7FFFFF)) + below) >> 20
    code = torch.where((relative >= 1) & (exponent >= 1), code.clamp(max=8 * levels + 7), 0)
    if levels == LEVELS[MOMENTS[0]]:
        code |= (bits >> 24) & 0x80
    else:  # a second moment that is too small for the block is not 0, as the update divides by its root
        code = torch.where((relative < 1) & (exponent >= 1), 8, code)
    return code.to(torch.uint8), largest.to(torch.uint8)


def _decode_blocks(codes: Tensor, scales: Tensor, levels: int) -> Tensor:
    code = codes.to(torch.int32)
    largest = scales.to(torch.int32).repeat_interleave(BLOCK)
    signed = levels == LEVELS[MOMENTS[0]]
    size = code & 0x7F if signed else code
    relative = size >> 3
    bits = torch.where(relative >= 1, ((largest - levels + relative) << 23) | ((size & 7) << 20), 0)
    if signed:
        bits = bits | ((code & 0x80) << 24)
    return bits.view(torch.float32)
