"""A quantised weight in a Hugging Face folder: finds its tensors, checks their headers, and reads its rows.

config.json says which schemes a folder may have (`families.quantization`). The tensors of a weight tell which of these
schemes it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.checkpoint.format.header import ITEM_BYTES
from meshwright.kernels.dequantize import (
    for_rows,
    in_output_order,
    nibbles,
    powers_of_two,
    scaled,
    small_floats,
    unpack_words,
)
from meshwright.kernels.row_quantize import RoundedMatrix, rounded_matrix
from meshwright.spec.errors import BadInput, Damaged, MeshwrightError
from meshwright.spec.folder_files import parse_json
from meshwright.spec.weight_scheme import FP8_BLOCK, MAP_SIZE, StoredTensor, WeightScheme

STATE_BYTES = 4096
"""Largest size in bytes of the record that bitsandbytes stores with a weight."""
_LARGEST_BLOCK = 1 << 20


class Slice(Protocol):
    """A tensor in a safetensors file. Indexing reads a part of it."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> Tensor: ...


@dataclass(frozen=True)
class Stored:
    """Access to the tensors of a folder."""

    read: Callable[[str], Slice]
    """Returns a tensor by name. Raises Damaged if its file cannot be read."""
    where: Callable[[str], str]
    """Returns the path of a tensor's file, for messages."""
    device: torch.device
    """Where weights are unpacked."""

    def tensor(self, name: str, *index: slice) -> Tensor:
        """Return a tensor, or the part `index` of it, on the device."""
        stored = self.read(name)
        return (stored[index] if index else stored[...]).to(self.device)

    def check(self, name: str, part: StoredTensor, scheme: WeightScheme) -> None:
        """Raise BadInput or Damaged unless the tensor `name` has a dtype and a shape that its scheme allows."""
        stored = self.read(name)
        dtype = stored.get_dtype()
        shape = tuple(stored.get_shape())
        if dtype not in part.dtypes:
            raise BadInput(
                f"{self.where(name)}: {name}: expected {' or '.join(part.dtypes)} by the scheme {scheme.name}, got {dtype}"
            )
        if shape not in part.shapes:
            expected = " or ".join(map(str, part.shapes))
            raise Damaged(
                f"{self.where(name)}: {name}: expected shape {expected} by config.json and the scheme {scheme.name}, got {shape}"
            )


@dataclass
class StoredWeight:
    """A quantised weight `(out, in)`, or `(experts, out, in)` if the folder stacks its experts.

    `names` has the full name of each of its tensors by the end of the name, such as `.weight_scale`.
    """

    scheme: WeightScheme
    names: Mapping[str, str]
    shape: tuple[int, ...]
    stored: Stored
    _index: Tensor | None = field(default=None, repr=False)

    @property
    def bytes(self) -> int:
        """Bytes of the weight in the folder."""
        headers = map(self.stored.read, self.names.values())
        return sum(math.prod(each.get_shape()) * ITEM_BYTES[each.get_dtype()] for each in headers)

    def check(self) -> None:
        """Read the tensor that stores the weight's shape, if there is one. Raises Damaged if it is another shape."""
        if (name := self.names.get(self.scheme.shape_name or "")) is not None:
            found = tuple(self.stored.read(name)[...].tolist())
            if found != self.shape:
                raise Damaged(f"{self.stored.where(name)}: {name}: expected {self.shape} by config.json, got {found}")

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last) in fp32, `(last - first, in)`. Of stacked experts: `(last - first, out, in)`."""
        numbers = self._numbers(first, last)
        inputs = self.shape[-1]
        return scaled(
            numbers, self._zeros(first, last), self._scale(first, last), self.scheme.block[1] or inputs, self._groups()
        )

    def rounded_rows(self, first: int, last: int) -> RoundedMatrix:
        """Return rows [first, last) as stored: 8-bit values, with a scale per output or block. Only for `native` schemes.

        If the weight has scales per block, `first` must be the first row of a block.
        """
        assert self.scheme.native is not None
        scale = self._scale(first, last).contiguous()
        if self.scheme.native == "fp8 blocks":
            assert first % FP8_BLOCK == 0, "a block is whole"
            scale = scale[::FP8_BLOCK].contiguous()
        return rounded_matrix(self._tensor(self.scheme.values, first, last), scale, self.scheme.native)

    def _tensor(self, end: str, first: int, last: int) -> Tensor:
        return self.stored.tensor(self.names[end], slice(first, last))

    def _numbers(self, first: int, last: int) -> Tensor:
        """Return the stored elements `(rows, in)` before zero points and scales. Packed integers are unsigned."""
        scheme = self.scheme
        end = self.scheme.values
        inputs = self.shape[-1]
        if scheme.packing == "plain":
            return self._tensor(end, first, last)
        if scheme.packing == "words":
            return unpack_words(self._tensor(end, first, last), scheme.bits, inputs)
        if scheme.packing in ("bytes", "blocks"):
            return small_floats(
                nibbles(self._tensor(end, first, last).flatten(-2 if scheme.packing == "blocks" else -1))
            )[..., :inputs]
        if scheme.packing == "input words":
            words = self.stored.tensor(self.names[end], slice(None), slice(first, last))
            return unpack_words(words.t(), scheme.bits, inputs)
        return self._by_output(end, first, last)

    def _by_output(self, end: str, first: int, last: int) -> Tensor:
        """Return the outputs [first, last) as rows `(last - first, …)`, of elements `(…, outputs)` packed along outputs."""
        bits = self.scheme.bits
        awq = self.scheme.packing == "output words"
        count = 32 // bits
        start = first // count
        stop = -(-last // count)
        words = self.stored.tensor(self.names[end], slice(None), slice(start, stop))
        numbers = unpack_words(words, bits, (stop - start) * count)
        numbers = in_output_order(numbers) if awq else numbers
        return numbers[:, first - start * count : last - start * count].t()

    def _zeros(self, first: int, last: int) -> Tensor | None:
        """Return the zero points `(rows, groups)` in fp32, or None.

        Packed integers without stored zero points are symmetric: their zero point is half of their range.
        """
        scheme = self.scheme
        if scheme.zeros is None:
            packed = scheme.packing in ("words", "input words", "output words")
            return torch.full((1, 1), 2.0 ** (scheme.bits - 1), device=self.stored.device) if packed else None
        if scheme.packing == "plain":
            return self._grid(scheme.zeros, first, last).float()
        if scheme.packing == "words":
            count = 32 // scheme.bits
            start = first // count
            stop = -(-last // count)
            words = self.stored.tensor(self.names[scheme.zeros], slice(start, stop))
            zeros = unpack_words(words.t(), scheme.bits, (stop - start) * count).t()
            return zeros[first - start * count : last - start * count].float()
        zeros = self._by_output(scheme.zeros, first, last).int()
        return ((zeros + scheme.zero_offset) & ((1 << scheme.bits) - 1)).float()

    def _scale(self, first: int, last: int) -> Tensor:
        """Return the scales `(rows, groups)` in fp32, including the factor of the whole weight, if there is one."""
        scheme = self.scheme
        end = next(name for name in scheme.scales if name in self.names)
        scale = self._grid(end, first, last)
        scale = powers_of_two(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.float()
        if scheme.factor is not None:
            factor = self.stored.tensor(self.names[scheme.factor]).float().flatten()
            scale = scale / factor if scheme.divides else scale * factor
        return scale

    def _grid(self, end: str, first: int, last: int) -> Tensor:
        """Return the stored scales or zero points `(rows, groups)` of rows [first, last)."""
        name = self.names[end]
        height = self.scheme.block[0]
        if self.scheme.packing in ("input words", "output words"):
            return self.stored.tensor(name, slice(None), slice(first, last)).t()
        if self.scheme.packing == "blocks":
            return self._tensor(end, first, last)
        if height == 0:
            return for_rows(self.stored.tensor(name).reshape(1, -1), 0, first, last)
        if not self.stored.read(name).get_shape():  # a scalar: the whole weight is one block
            return for_rows(self.stored.tensor(name).reshape(1, 1), height, first, last)
        grid = self.stored.tensor(name, slice(first // height, -(-last // height)))
        return for_rows(grid.reshape(len(grid), -1), height, first, last)

    def _groups(self) -> Tensor | None:
        """Return the group of each input, if the folder stores such an index. Raises Damaged if one is out of range."""
        if (name := self.names.get(self.scheme.index or "")) is None:
            return None
        if self._index is None:
            index = self.stored.tensor(name).long()
            groups = self.scheme.groups(self.shape[-1])
            if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < groups:
                raise Damaged(
                    f"{self.stored.where(name)}: {name}: expected groups from 0 to {groups - 1}, got {int(index.min())} to "
                    f"{int(index.max())}"
                )
            self._index = index
        return self._index


@dataclass
class MappedWeight(StoredWeight):
    """A weight of bitsandbytes: indices into a table of values, times scales.

    The scales may themselves be stored in 8 bits: as indices into a table, times scales of scales, plus an offset
    ("double quantisation").
    """

    block: int = 0
    """How many elements of the weight share a scale."""
    nested_block: int = 0
    """How many scales share a scale; 0 if the scales are fp32."""
    offset: float = 0.0
    """Added to all scales that are stored in 8 bits."""

    @classmethod
    def record(cls, base: str, scheme: WeightScheme, shape: tuple[int, ...], stored: Stored) -> dict[str, Any]:
        """Return the fields `block` to `offset` from the JSON record that bitsandbytes stores with the weight.

        Raises Damaged if the record is invalid or describes another weight.
        """
        name = f"{base}{state_end(scheme)}"
        text = stored.read(name)
        where = f"{stored.where(name)}: {name}"
        if text.get_dtype() != "U8" or len(text.get_shape()) != 1 or text.get_shape()[0] > STATE_BYTES:
            raise Damaged(f"{where}: expected at most {STATE_BYTES} bytes of JSON")
        state = parse_json(bytes(text[...].tolist()), where)
        state = state if isinstance(state, dict) else {}
        if state.get("quant_type") != scheme.name or state.get("shape") != list(shape):
            raise Damaged(
                f"{where}: expected quant_type {scheme.name} and shape {list(shape)} by config.json, got "
                f"{state.get('quant_type')!s:.20} and {state.get('shape')!s:.40}"
            )
        block = state.get("blocksize")
        nested = state.get("nested_blocksize")
        offset = state.get("nested_offset", 0.0)
        for key, value in (("blocksize", block), ("nested_blocksize", 1 if nested is None else nested)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_BLOCK:
                raise Damaged(f"{where}: {key}: expected a positive number of weights, got {value!s:.40}")
        if isinstance(offset, bool) or not isinstance(offset, (int, float)):
            raise Damaged(f"{where}: nested_offset: expected a number, got {offset!s:.40}")
        return {"block": block, "nested_block": nested or 0, "offset": float(offset)}

    @staticmethod
    def parts(scheme: WeightScheme, shape: tuple[int, ...], record: Mapping[str, Any]) -> dict[str, StoredTensor]:
        """Return the tensors of the weight, as `WeightScheme.parts` does. `record` is the result of the method `record`.

        The tensor of the record itself is not included.
        """
        count = math.prod(shape)
        scales = -(-count // record["block"])
        found = {
            scheme.values: StoredTensor(("U8",), ((-(-count // 2), 1),)),
            ".weight.absmax": StoredTensor(("U8" if record["nested_block"] else "F32",), ((scales,),)),
            ".weight.quant_map": StoredTensor(("F32",), ((MAP_SIZE,),)),
        }
        if record["nested_block"]:
            found[".weight.nested_absmax"] = StoredTensor(("F32",), ((-(-scales // record["nested_block"]),),))
            found[".weight.nested_quant_map"] = StoredTensor(("F32",), ((256,),))
        return found

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last) in fp32, `(last - first, in)`."""
        inputs = self.shape[-1]
        start = first * inputs
        stop = last * inputs
        # Two elements are in a byte. If the first row begins in the middle of a byte, its first half is cut off.
        pairs = self._tensor(self.scheme.values, start // 2, -(-stop // 2))
        indices = nibbles(pairs.flatten(), high_first=True)[start % 2 :][: stop - start]
        # The first scale that is needed; `repeat_interleave` then gives each element its scale.
        top = start // self.block
        scale = self._absmax(top, -(-stop // self.block)).repeat_interleave(self.block)[start - top * self.block :]
        table = self.stored.tensor(self.names[".weight.quant_map"])
        return (table[indices.int()] * scale[: stop - start]).view(last - first, inputs)

    def _absmax(self, first: int, last: int) -> Tensor:
        """Return the scales [first, last) of the weight in fp32."""
        scale = self._tensor(".weight.absmax", first, last)
        if not self.nested_block:
            return scale
        top = first // self.nested_block
        nested = self._tensor(".weight.nested_absmax", top, -(-last // self.nested_block))
        nested = nested.repeat_interleave(self.nested_block)[first - top * self.nested_block :][: last - first]
        return self.stored.tensor(self.names[".weight.nested_quant_map"])[scale.int()] * nested + self.offset


def state_end(scheme: WeightScheme) -> str:
    """Return the end of the name of the tensor in which bitsandbytes stores its record of a weight."""
    return f".weight.quant_state.bitsandbytes__{scheme.name}"


def find_weight(
    name: str, shape: tuple[int, ...], files: Mapping[str, str], schemes: Sequence[WeightScheme], stored: Stored
) -> StoredWeight | None:
    """Return the quantised weight that the folder stores in place of the ordinary weight `name`; None if there is none.

    `shape` is the weight's shape, `files` the file of each tensor in the folder, `schemes` the schemes that config.json
    allows. Raises BadInput or Damaged if tensors of a scheme are missing or have other dtypes or shapes than it requires.
    """
    base = name.removesuffix(".weight")
    stacked = not name.endswith(".weight")
    present = [
        scheme for scheme in schemes if base + scheme.values in files and stacked == (scheme.packing == "blocks")
    ]
    failure: MeshwrightError | None = None
    for scheme in present:
        try:
            return _weight(base, shape, files, scheme, stored)
        except (BadInput, Damaged) as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return None


def _weight(
    base: str, shape: tuple[int, ...], files: Mapping[str, str], scheme: WeightScheme, stored: Stored
) -> StoredWeight:
    """Return the weight `base` stored by one scheme, after checking its tensors.

    Raises BadInput or Damaged if a tensor is missing or has another dtype or shape than the scheme requires.
    """
    record: dict[str, Any] = {}
    if scheme.packing == "flat":
        _require(base + state_end(scheme), files, scheme, stored, base + scheme.values)
        record = MappedWeight.record(base, scheme, shape, stored)
        parts = MappedWeight.parts(scheme, shape, record)
    else:
        parts = scheme.parts(shape)
    names = {state_end(scheme): base + state_end(scheme)} if record else {}
    for end, part in parts.items():
        name = base + end
        if end in scheme.scales:
            # A scheme may have several names for its scales. The first name that the folder has is used.
            several = [other for other in scheme.scales if base + other in files]
            if end != (several[0] if several else scheme.scales[0]):
                continue
        if name not in files and part.optional:
            continue
        _require(name, files, scheme, stored, base + scheme.values)
        stored.check(name, part, scheme)
        names[end] = name
    weight = (
        MappedWeight(scheme, names, shape, stored, **record) if record else StoredWeight(scheme, names, shape, stored)
    )
    weight.check()
    return weight


def _require(name: str, files: Mapping[str, str], scheme: WeightScheme, stored: Stored, beside: str) -> None:
    if name not in files:
        raise Damaged(f"{stored.where(beside)}: no tensor {name}, which the scheme {scheme.name} has beside {beside}")
