"""Writes weights as a Hugging Face folder and reads them from one, a part of a tensor at a time and without pickle.

The package `families` knows the tensor names and the fields of config.json of each model family; this module reads and
writes the files. The weights are in the safetensors format (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from meshwright.checkpoint.models.quantized import Stored, StoredWeight, find_weight
from meshwright.checkpoint.models.towers import Towers, check_tensors, towers_beside, towers_sentence
from meshwright.data.chat_template import GENERATION_CONFIG
from meshwright.data.text_format import TextFormat, derive, export_text_files, exported_ids, named_bos
from meshwright.data.tokenizer_file import open_tokenizer
from meshwright.durable.writes import new_folder, sync_file, write_durable
from meshwright.families.folder import (
    SPECIAL_IDS,
    HFTensor,
    folder_fields,
    folder_nesting,
    folder_quantization,
    gguf_hint,
    hf_tensors,
    prediction_copies,
    read_json,
    to_hf_config,
    to_whole_config,
)
from meshwright.families.quantization import CACHE_SCALES, KEY, Quantization
from meshwright.families.registry import FAMILIES
from meshwright.families.text_part import Nesting
from meshwright.kernels.row_quantize import RoundedMatrix, rounded_matrix
from meshwright.spec.errors import BadInput, Damaged, OutOfResources, nearest
from meshwright.spec.fields import from_plain
from meshwright.spec.folder_files import TOKENIZER_BYTES, check_inside, read_folder_file
from meshwright.spec.model import ModelSpec, ParameterSpec, parameter_count, parameters
from meshwright.spec.weight_scheme import LayerFormat

SLICE_BYTES = 32 << 20
"""Bytes of a weight that an export reads from a `RowSource` at a time."""


@runtime_checkable
class RowSource(Protocol):
    """Weights that can be read by rows of dimension 0, so that no weight has to be in memory as a whole.

    `shape(name)` returns the shape of a parameter, `read_rows(name, start, stop)` its rows [start, stop).
    """

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read_rows(self, name: str, start: int, stop: int) -> Tensor: ...


Source = Callable[[str], Tensor] | Iterable[tuple[str, Tensor]] | RowSource
"""Weights to export: a function from a parameter's name to its value, pairs (name, value) in any order, or a RowSource."""
DTYPES = {"bf16": (torch.bfloat16, "BF16"), "fp32": (torch.float32, "F32")}
"""dtypes in which weights can be exported: torch's dtype, and its name in safetensors."""
FLOATS = ("F64", "F32", "F16", "BF16")
BASE_MODEL = "A base model, exported by Meshwright: it continues text, and was not tuned to follow instructions."
"""Sentence of the model card of a model that was trained from scratch on text."""
OF_TEXTS = "What it writes may be wrong or unwanted."
OF_SCORES = "It gives a text one number, read at its last token: compare numbers of answers to the same prompt. They may be wrong."
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def export_hf(
    folder: Path,
    spec: ModelSpec,
    tensors: Source,
    *,
    tokenizer: Path | None,
    run_note: str,
    dtype: str = "bf16",
    shard_bytes: int = 4 << 30,
    text: TextFormat | None = None,
    towers: Towers | None = None,
    title: str | None = None,
    limits: str = BASE_MODEL,
) -> None:
    """Write a folder that transformers, vLLM and others load: weights, config, generation config, tokenizer, model card.

    `tensors`: the weights (`Source`). One tensor, or 32 MiB of rows, is in memory at a time.
    `tokenizer`: path of a tokenizer.json. Its folder may have further files about texts
        (`data.chat_template.TEXT_FILES`).
    `text`: the format of the texts; None takes the format that the tokenizer's folder describes.
    `towers`: the other tensors of a model that also reads images or sound. With them the folder is that of the whole
        model, otherwise of the text model.
    `run_note`: Markdown for the model card. `limits`: what the card says about the use of the model.
    `title`: title of the card; None takes the folder's name.
    `shard_bytes`: no file of weights is larger, unless a single tensor is.

    The folder gets its final name when it is complete. Raises BadInput if the folder exists and is not empty, if the
    Hugging Face class of the family cannot represent the model, or if tokenizer and model disagree. Raises OutOfResources
    if the disk is too full.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder}: already there and not empty; choose another folder or remove it")
    loaded = None if tokenizer is None else _load_tokenizer(tokenizer, spec)
    bos = None
    if tokenizer is not None and loaded is not None:
        text = text or derive(tokenizer.parent, loaded, content=read_folder_file(tokenizer, TOKENIZER_BYTES))
        bos = named_bos(tokenizer.parent, loaded)
    special_ids = None if text is None else exported_ids(text, bos)
    if special_ids is not None and spec.head == "score" and text is not None and text.pad in text.stops:
        # transformers reads the score at the last token that is not padding. The token that ends the last answer must
        # not count as padding there.
        special_ids["pad_token_id"] = None
    if towers is None:
        config = to_hf_config(spec, dtype=dtype, special_ids=special_ids)
    else:
        check_tensors(towers)
        config = to_whole_config(towers.config, spec, dtype=dtype, special_ids=special_ids)
    shards = _plan_shards(spec, dtype, shard_bytes, towers)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_space(folder.parent, sum(shard.total for shard in shards))
    with new_folder(folder) as partial:
        _write_weights(partial, spec, tensors, shards, DTYPES[dtype][0], towers)
        _write_json(partial / "config.json", config)
        if tokenizer is None or loaded is None or text is None:
            _write_json(partial / GENERATION_CONFIG, {key: config.get(key) for key in SPECIAL_IDS})
        else:
            write_durable(partial / "tokenizer.json", read_folder_file(tokenizer, TOKENIZER_BYTES))
            export_text_files(text, tokenizer.parent, partial, loaded, _tokenizer_config(spec))
        if towers is not None:
            towers.copy_settings(partial)
        card = _model_card(title or folder.name, folder.name, spec, config["architectures"], run_note, dtype, limits)
        write_durable(partial / "README.md", card)


CPU = torch.device("cpu")


def import_hf(folder: Path, device: torch.device = CPU) -> tuple[ModelSpec, HFReader]:
    """Return the model in a Hugging Face folder, and a reader of its weights. Quantised weights are unpacked on `device`.

    Raises BadInput for a model that this program cannot compute, for weights that are not safetensors, and for tensors
    that the model does not have. Raises Damaged for files that are unreadable or do not match each other.
    """
    fields, notes = folder_fields(folder)
    spec = from_plain(ModelSpec, fields)
    files = _weight_files(folder)
    reader = HFReader(folder, spec, files, notes, folder_nesting(folder), folder_quantization(folder), device)
    reader.check()
    if (words := reader.stored_words()) is not None:
        reader.notes += (f"{words} are expanded",)
    if reader.nesting is not None:
        reader.notes += (towers_sentence(reader.others),)
    return spec, reader


@dataclass
class HFReader:
    """Reads a model's parameters from a Hugging Face folder by rows. Names and shapes are those of this program."""

    folder: Path
    spec: ModelSpec
    files: dict[str, str]
    """The file of each tensor in the folder."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about settings in config.json that this program ignores."""
    nesting: Nesting | None = None
    """Where the text model's tensors are, in the folder of a model that also reads images or sound; else None."""
    quantization: Quantization | None = None
    """What config.json says about quantised weights."""
    device: torch.device = CPU
    """Where quantised weights are unpacked. Their rows are returned on this device, all other rows on the CPU."""
    _open: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        base = FAMILIES[self.spec.family].base
        bare = self.nesting is None and not any(name.startswith(base) for name in self.files)
        self._base = base if bare else ""
        self._parts = hf_tensors(self.spec, self.nesting)
        self._quantised: dict[str, StoredWeight | None] = {}

    @property
    def others(self) -> list[str]:
        """Tensors of the folder that do not belong to its text model."""
        if self.nesting is None:
            return []
        family = FAMILIES[self.spec.family]
        return [name for name in self.files if not self.nesting.contains(family, name)]

    def other(self, name: str) -> Tensor:
        """Return one of `others` as it is stored."""
        return self._stored(name)[...]

    def towers(self) -> Towers | None:
        """Return the tensors and settings that do not belong to the text model; None if the folder has a text model only."""
        if self.nesting is None:
            return None
        return towers_beside(self.folder, {name: self.files[name] for name in self.others}, self.nesting)

    def read(self, parameter: ParameterSpec) -> Tensor:
        """Return the whole parameter, in the dtype of the folder."""
        return self.read_rows(parameter, 0, parameter.shape[0])

    def read_rows(self, parameter: ParameterSpec, start: int, stop: int) -> Tensor:
        """Return the rows [start, stop) of dimension 0."""
        pieces = []
        for part, first, last in self._ranges(parameter, start, stop):
            pieces.append(self._slice(part, first, last))
        if not pieces:
            return torch.empty((0, *parameter.shape[1:]))
        return self._whole(pieces).unflatten(0, (-1, *parameter.shape[1:-1]))

    def native(self, parameter: ParameterSpec) -> LayerFormat | None:
        """Return the 8-bit format in which the whole parameter is stored; None if it is not stored so.

        Only a matrix can have the format "fp8 blocks", not stacked experts.
        """
        if len(parameter.shape) < 2:
            return None
        weights = [self._weight(part) for part in self._parts[parameter.name]]
        formats = {None if weight is None else weight.scheme.native for weight in weights}
        found = formats.pop() if len(formats) == 1 else None
        return None if found == "fp8 blocks" and len(parameter.shape) > 2 else found

    def first_rows(self, parameter: ParameterSpec) -> list[int]:
        """Return the first row of each tensor of the folder that the parameter consists of."""
        return [part.first_row for part in self._parts[parameter.name]]

    def read_rounded(self, parameter: ParameterSpec, start: int, stop: int) -> RoundedMatrix:
        """Return the rows [start, stop) of dimension 0 of a `native` parameter, as they are stored.

        The scales are `(…, out, 1)`, or those of `Fp8Blocks`.
        """
        pieces = []
        for part, first, last in self._ranges(parameter, start, stop):
            weight = self._weight(part)
            assert weight is not None
            pieces.append(weight.rounded_rows(first, last))
        number_format = self.native(parameter)
        sizes = (-1, *parameter.shape[1:-1])
        assert number_format is not None
        values, scale = (self._whole([piece[index] for piece in pieces]).unflatten(0, sizes) for index in (0, 1))
        return rounded_matrix(values, scale, number_format)

    def stored_words(self) -> str | None:
        """Return a text on how the quantised weights are stored, with their number and bytes; None if there are none."""
        weights = [weight for weight in self._quantised.values() if weight is not None]
        if not weights:
            return None
        names = dict.fromkeys(weight.scheme.name for weight in weights)
        plain = sum(weight is None for weight in self._quantised.values())
        others = f", {plain} others are not quantised" if plain else ""
        return f"{len(weights)} weights in {' and '.join(names)} ({_gigabytes(sum(each.bytes for each in weights))}{others})"

    def quantised_parameters(self) -> list[str]:
        """Return the names of the parameters that are quantised in the folder, as a whole or in part."""
        return [name for name, parts in self._parts.items() if any(self._weight(part) is not None for part in parts)]

    def remarks(self) -> tuple[str, ...]:
        """Return sentences about settings of activations and caches in the folder that this program does not use."""
        weights = [weight for weight in self._quantised.values() if weight is not None]
        static = any({*weight.scheme.inputs} & {*weight.names} for weight in weights if weight.scheme.activations)
        scales = [name for name in self.files if self._is_cache_scale(name)]
        found = ["activations get a scale for each token, not the folder's static ones"] if static else []
        if scales:
            found.append(f"{len(scales)} scales of cached keys and values are not used: those of the cache are 1")
        return tuple(found)

    def _is_cache_scale(self, name: str) -> bool:
        return self.quantization is not None and self.quantization.cache_scales and name.endswith(CACHE_SCALES)

    def _ranges(self, parameter: ParameterSpec, start: int, stop: int) -> Iterator[tuple[HFTensor, int, int]]:
        """Yield (tensor, first, last) for each tensor of the folder that has some of the parameter's rows [start, stop).

        The tensor's rows [first, last) are needed.
        """
        rows_per_index = math.prod(parameter.shape[1:-1])
        for part in self._parts[parameter.name]:
            first = max(start * rows_per_index - part.first_row, 0)
            last = min(stop * rows_per_index - part.first_row, part.row_count)
            if first < last:
                yield part, first, last

    def _whole(self, pieces: list[Tensor]) -> Tensor:
        """Join parts of a parameter along dimension 0. If only some of them were quantised, they are on different devices."""
        if len(pieces) == 1:
            return pieces[0]
        if any(piece.device != pieces[0].device for piece in pieces):
            pieces = [piece.to(self.device) for piece in pieces]
        return torch.cat(pieces)

    def check(self) -> None:
        """Compare names, shapes and dtypes of all tensors with what the model needs.

        Values are read only for tensors that must be copies of others.
        """
        needed = {self._stored_name(part): part for parts in self._parts.values() for part in parts}
        read: set[str] = set()
        for name, part in needed.items():
            if (weight := self._weight(part)) is not None:
                self._check_quantised(name, part)
                read |= {*weight.names.values()}
                continue
            if name not in self.files:
                near = nearest(name, self.files)
                hint = f" (nearest: {near})" if near else ""
                raise Damaged(f"{self.folder}: no tensor {name}, which config.json calls for{hint}")
            self._check_tensor(name, part)
        copies = self._copies()
        placed = {*needed, *read, *copies, *self.others}
        spare = [name for name in self.files if name not in placed and not self._is_unused(name)]
        if spare and self._is_scale(spare[0], needed):
            raise BadInput(f"{self._where(spare[0])}: {spare[0]} has no place beside its weight{self._schemes()}")
        if spare:
            near = nearest(spare[0], needed)
            hint = f" (nearest: {near})" if near else ""
            more = f" and {len(spare) - 1} more" if len(spare) > 1 else ""
            raise BadInput(
                f"{self.folder}: tensor {spare[0]}{more} has no place in this {self.spec.family} model{hint}"
            )
        for copy, original in copies.items():
            self._check_copy(copy, original)

    def _check_tensor(self, name: str, part: HFTensor) -> None:
        """Raise Damaged or BadInput unless the folder's tensor `name` has the shape of `part` and a floating-point dtype."""
        stored = self._stored(name)
        shape = tuple(stored.get_shape())
        dtype = stored.get_dtype()
        if shape != part.shape:
            raise Damaged(
                f"{self.folder / self.files[name]}: {name}: expected shape {part.shape} by config.json, got {shape}"
            )
        if dtype not in FLOATS:
            quantised = len(shape) > 1 and self.quantization is None
            hint = f"; config.json has no {KEY}, which says how to read other numbers" if quantised else ""
            raise BadInput(f"{self._where(name)}: {name}: expected one of {', '.join(FLOATS)}, got {dtype}{hint}")

    def _check_quantised(self, name: str, part: HFTensor) -> None:
        """Raise BadInput for a quantised weight if config.json lists it as not quantised, or its family stores it transposed."""
        assert self.quantization is not None
        module = name.removesuffix(".weight")
        if (entry := self.quantization.ignores(module)) is not None:
            raise BadInput(
                f"{self.folder / 'config.json'}: {KEY}: {entry} is listed as not quantised, but {module} has scales in "
                f"{self._file_of(module)}; correct the list"
            )
        if part.transposed and not part.stacked:
            raise BadInput(f"{self.folder}: {name} is quantised, which is not read in a {self.spec.family} folder")

    def _schemes(self) -> str:
        """Return a text on the schemes that config.json allows."""
        if self.quantization is None:
            return f": config.json has no {KEY}"
        return f" by {KEY} of config.json ({', '.join(each.name for each in self.quantization.schemes)})"

    def _where(self, name: str) -> str:
        return str(self.folder / self.files[name])

    def _file_of(self, module: str) -> str:
        return next(file for name, file in self.files.items() if name.startswith(module))

    def _is_scale(self, name: str, needed: Collection[str]) -> bool:
        """Return whether the name begins with that of a layer that the model needs: it may be a scale of its weight."""
        bases = {weight.removesuffix(".weight") for weight in needed}
        return any(name.startswith((f"{base}.", f"{base}_")) for base in bases)

    def _weight(self, part: HFTensor) -> StoredWeight | None:
        """Return the quantised weight of a tensor; None if it is stored as ordinary numbers."""
        name = self._stored_name(part)
        if self.quantization is None or len(part.shape) < 2:
            return None
        if name not in self._quantised:
            plain = name in self.files and self._stored(name).get_dtype() in FLOATS
            outputs = part.row_count
            inputs = part.shape[-2 if part.transposed else -1]
            shape = (part.shape[0], outputs // part.shape[0], inputs) if part.stacked else (outputs, inputs)
            stored = Stored(self._stored, self._where, self.device)
            schemes = self.quantization.schemes
            self._quantised[name] = None if plain else find_weight(name, shape, self.files, schemes, stored)
        return self._quantised[name]

    def _slice(self, part: HFTensor, first: int, last: int) -> Tensor:
        """Return the rows [first, last) of a tensor of the folder, in the order of our parameter."""
        name = self._stored_name(part)
        rows = part.row_count // part.shape[0] if part.stacked else 1  # rows of each expert
        if (weight := self._weight(part)) is not None:
            values = weight.rows(first // rows, last // rows)
            return from_stacked(replace(part, transposed=False), values) if part.stacked else values
        stored = self._stored(name)
        if part.stacked:
            return from_stacked(part, stored[first // rows : last // rows])
        if part.one_row:
            return stored[0, first:last]
        return stored[:, first:last].t().contiguous() if part.transposed else stored[first:last]

    def _stored(self, name: str) -> Any:
        """Return the folder's tensor `name`, of which parts can be read. Its file stays open."""
        file = self.files[name]
        try:
            if file not in self._open:
                self._open[file] = _opened(self.folder / file)
            return self._open[file].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise Damaged(
                f"{self.folder / file}: tensor {name} cannot be read ({error}); copy the file again"
            ) from error

    def _stored_name(self, part: HFTensor) -> str:
        if self.nesting is not None:
            return self.nesting.name(FAMILIES[self.spec.family], part.name)
        return part.name.removeprefix(self._base)

    def _copies(self) -> dict[str, str]:
        """Return the tensors of the folder that must repeat another one, each with its original.

        Such tensors are a tied head, and the weights that prediction modules share with the model.
        """
        head = HFTensor(f"{FAMILIES[self.spec.family].ends['head']}.weight", 0, 0, (), False)
        copies = {self._stored_name(head): "embed.weight"} if self.spec.tied else {}
        for parameter, parts in prediction_copies(self.spec).items():
            copies |= {self._stored_name(part): parameter for part in parts}
        originals = {name: self._stored_name(self._parts[parameter][0]) for name, parameter in copies.items()}
        return {name: original for name, original in originals.items() if name in self.files and name != original}

    def _check_copy(self, name: str, original: str) -> None:
        """Raise BadInput if a tensor differs from the one that it must repeat."""
        if original not in self.files:
            raise BadInput(f"{self._where(name)}: {name} must repeat {original}, which is quantised; remove the copy")
        copy = self._stored(name)
        expected = self._stored(original)
        shape = copy.get_shape()
        equal = shape == expected.get_shape() and copy.get_dtype() == expected.get_dtype()
        rows = max(1, SLICE_BYTES // (4 * math.prod(shape[1:])))
        if equal and all(
            torch.equal(copy[first : first + rows].view(torch.uint8), expected[first : first + rows].view(torch.uint8))
            for first in range(0, shape[0], rows)
        ):
            return
        tied = "; set tie_word_embeddings to false in config.json if the model has a head of its own"
        raise BadInput(
            f"{self.folder}: {name} differs from {original}, which it must repeat by config.json"
            + (tied if name.endswith("lm_head.weight") else "")
        )

    def _is_unused(self, name: str) -> bool:
        family = FAMILIES[self.spec.family]
        return self._is_cache_scale(name) or name.endswith(family.unused) or name.startswith(family.unread)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def from_stacked(part: HFTensor, stored: Tensor) -> Tensor:
    """Convert experts from the folder's layout to ours.

    `stored` is `(experts, out, in)`, or `(experts, in, out)` if `part.transposed`; the result is `(experts · out, in)`.
    Biases are `(experts, out)` before and after. With `part.interleaved` the folder's outputs alternate between gate and
    up; our gates come first.
    """
    ours = stored.mT if part.transposed else stored
    if part.interleaved:
        ours = ours.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return ours.flatten(0, -2).contiguous()


def _to_stacked(part: HFTensor, rows: Tensor) -> Tensor:
    """Convert whole experts from our layout to the folder's; the inverse of `from_stacked`."""
    theirs = rows.unflatten(0, (-1, part.row_count // part.shape[0])) if len(part.shape) == 3 else rows
    if part.interleaved:
        theirs = theirs.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return theirs.mT if part.transposed else theirs


def _opened(path: Path) -> Any:
    """Open a safetensors file. Raises BadInput without permission; safetensors would say that there is no such file."""
    check_inside(path)
    if path.exists() and not os.access(path, os.R_OK):
        raise BadInput(f"{path}: permission denied; this user must be able to read it")
    return safe_open(path, framework="pt")


def _weight_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by name: from the index, or from the header if there is a single file."""
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise Damaged(
                f"{folder / INDEX}: weight_map: expected tensor names with their files, got {type(listed).__name__}"
            )
        for name, file in listed.items():
            _check_file_name(folder, name, file)
        return listed
    if (folder / ONE_FILE).is_file():
        try:
            with _opened(folder / ONE_FILE) as stored:
                return dict.fromkeys(stored.keys(), ONE_FILE)
        except (SafetensorError, OSError) as error:
            raise Damaged(f"{folder / ONE_FILE}: cannot be read ({error}); copy the file again") from error
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    why = (
        f"; {pickled[0]} is pickle, which can run code: convert it to safetensors where you trust it" if pickled else ""
    )
    raise BadInput(f"{folder}: expected {ONE_FILE} or {INDEX}{why or gguf_hint(folder)}")


def _check_file_name(folder: Path, name: str, file: Any) -> None:
    plain = isinstance(file, str) and Path(file).name == file and "\\" not in file and file.endswith(".safetensors")
    if not plain:
        raise BadInput(
            f"{folder / INDEX}: {name}: expected the plain name of a .safetensors file in this folder, got {file!r}"
        )
    if not (folder / file).is_file():
        raise Damaged(f"{folder / INDEX}: {name}: its file {file} is not there; copy the folder again, whole")


@dataclass(frozen=True)
class _Shard:
    """A file that will be written: name, header, the file offset of each tensor's first byte, and the size in bytes."""

    file: str
    header: bytes
    offsets: dict[str, int]
    total: int


def _plan_shards(spec: ModelSpec, dtype: str, shard_bytes: int, towers: Towers | None) -> list[_Shard]:
    """Divide the tensors of an exported folder among files of at most `shard_bytes`, in order."""
    groups: list[dict[str, dict[str, Any]]] = [{}]
    filled = 0
    for name, stored, shape, size in _stored_tensors(spec, dtype, towers):
        if filled and filled + size > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = {"dtype": stored, "shape": shape, "data_offsets": (filled, filled + size)}
        filled += size
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    return [_shard(file, group) for file, group in zip(names if len(names) > 1 else [ONE_FILE], groups, strict=True)]


def _stored_tensors(
    spec: ModelSpec, dtype: str, towers: Towers | None
) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield name, dtype, shape and bytes of each tensor of an exported folder. The text model's tensors come first."""
    for part in (part for parts in _written_tensors(spec, towers).values() for part in parts):
        torch_dtype, stored = DTYPES["fp32" if part.precise else dtype]
        yield _name_in(towers, spec, part), stored, part.shape, math.prod(part.shape) * torch_dtype.itemsize
    if towers is not None:
        for name, entry in towers.entries.items():
            yield name, entry.dtype, entry.shape, entry.end - entry.start


def _name_in(towers: Towers | None, spec: ModelSpec, part: HFTensor) -> str:
    """Return the name of a text model's tensor in a folder of the whole model, or (without towers) of the text model."""
    return part.name if towers is None else towers.nesting.name(FAMILIES[spec.family], part.name)


def _written_tensors(spec: ModelSpec, towers: Towers | None) -> dict[str, tuple[HFTensor, ...]]:
    """Return, for each parameter, the tensors of an exported folder that are filled from it, copies included."""
    copies = prediction_copies(spec)
    own = hf_tensors(spec, None if towers is None else towers.nesting)
    return {name: (*parts, *copies.get(name, ())) for name, parts in own.items()}


def _shard(file: str, entries: dict[str, dict[str, Any]]) -> _Shard:
    """Return the file for some tensors: a safetensors header, and the place of each tensor."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}
    return _Shard(file, header, offsets, len(header) + max(entry["data_offsets"][1] for entry in entries.values()))


def _write_weights(
    folder: Path,
    spec: ModelSpec,
    tensors: Source,
    shards: list[_Shard],
    dtype: torch.dtype,
    towers: Towers | None,
) -> None:
    """Write the files of weights and the index. Space for all tensors is reserved first, because tensors come in any order."""
    locations = {name: (shard.file, offset) for shard in shards for name, offset in shard.offsets.items()}
    for shard in shards:
        with open(folder / shard.file, "wb") as file:
            file.write(shard.header)
            file.truncate(shard.total)
    for part, first_row, rows in _slices(tensors, spec, towers):
        file, offset = locations[_name_in(towers, spec, part)]
        stored = torch.float32 if part.precise else dtype
        row_bytes = math.prod(rows.shape[1:]) * stored.itemsize
        _write_tensor(folder / file, offset + first_row * row_bytes, rows, part, stored)
    if towers is not None:
        for name, pieces in towers.tensors():
            file, offset = locations[name]
            with open(folder / file, "r+b") as opened:
                opened.seek(offset)
                opened.writelines(pieces)
    for shard in shards:
        sync_file(folder / shard.file)
    if len(shards) > 1:
        total = sum(shard.total - len(shard.header) for shard in shards)
        weight_map = {name: file for name, (file, _) in locations.items()}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _slices(tensors: Source, spec: ModelSpec, towers: Towers | None) -> Iterator[tuple[HFTensor, int, Tensor]]:
    """Yield (part, first row within the part, rows) until every part of every parameter is complete.

    A part is the slice of a parameter that Hugging Face stores as one tensor (`HFTensor`).
    """
    parts = _written_tensors(spec, towers)
    missing = {parameter.name: parameter for parameter in parameters(spec)}
    if isinstance(tensors, RowSource):
        for name, parameter in missing.items():
            _check_parameter(name, parameter, tensors.shape(name))
            for part in parts[name]:
                yield from _row_slices(tensors, parameter, part)
        return
    pairs = ((name, tensors(name)) for name in tuple(missing)) if callable(tensors) else iter(tensors)
    for name, tensor in pairs:
        _check_parameter(name, missing.pop(name, None), tuple(tensor.shape))
        if tensor.dim() > 2:
            tensor = tensor.flatten(0, -2)  # as HFTensor counts rows
        for part in parts[name]:
            yield part, 0, tensor[part.first_row : part.first_row + part.row_count]
    if missing:
        raise Damaged(
            f"weights to export: {len(missing)} of the model's parameters are missing, {next(iter(missing))} first"
        )


def _row_slices(source: RowSource, parameter: ParameterSpec, part: HFTensor) -> Iterator[tuple[HFTensor, int, Tensor]]:
    """Yield the rows of a part, `SLICE_BYTES` at a time. A transposed part comes at once, and experts come one by one."""
    rows_per_index = math.prod(parameter.shape[1:-1])
    width = math.prod(parameter.shape[1:][-1:])
    step = max(1, SLICE_BYTES // (4 * width))
    if part.transposed and not part.stacked:
        step = part.row_count
    elif rows_per_index > 1:
        step = rows_per_index
    end = part.first_row + part.row_count
    for start in range(part.first_row, end, step):
        stop = min(start + step, end)
        first = start // rows_per_index
        last = -(-stop // rows_per_index)
        rows = source.read_rows(parameter.name, first, last)
        rows = rows.flatten(0, -2) if rows.dim() > 2 else rows
        yield part, start - part.first_row, rows[start - first * rows_per_index : stop - first * rows_per_index]


def _check_parameter(name: str, parameter: ParameterSpec | None, shape: tuple[int, ...]) -> None:
    if parameter is None or shape != parameter.shape:
        expected = f"shape {parameter.shape}, got {shape}" if parameter else "each of the model's parameters once"
        raise BadInput(f"weights to export: {name}: expected {expected}")


def _write_tensor(path: Path, offset: int, tensor: Tensor, part: HFTensor, dtype: torch.dtype) -> None:
    """Write (rows of) a tensor at byte `offset` of a file, in the folder's layout and dtype."""
    if part.stacked:
        tensor = _to_stacked(part, tensor)
    elif part.transposed:
        tensor = tensor.t()
    values = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    with open(path, "r+b") as file:
        file.seek(offset)
        values.view(-1).view(torch.uint8).numpy().tofile(file)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_durable(path, json.dumps(value, indent=2) + "\n")


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutOfResources(
            f"{folder}: the export needs {needed:,} bytes and {free:,} are free; make room or choose another disk"
        )


def _load_tokenizer(path: Path, spec: ModelSpec) -> Tokenizer:
    """Return the tokenizer in a file. Raises BadInput if it has more tokens than the model."""
    tokenizer = open_tokenizer(path)
    size = tokenizer.get_vocab_size()
    if size > spec.vocab_size:
        raise BadInput(
            f"{path}: has {size} tokens, but model.vocab_size is {spec.vocab_size}; is it this model's tokenizer?"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokenizer_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the values of tokenizer_config.json for a tokenizer that has no such file."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }


def _model_card(
    title: str, folder: str, spec: ModelSpec, architectures: list[str], run_note: str, dtype: str, limits: str
) -> str:
    """Return the README.md of the folder; see `export_hf` for the arguments."""
    family = FAMILIES[spec.family]
    loader = "AutoModelForImageTextToText"
    tag = "image-text-to-text"
    if architectures == [family.architecture]:
        loader = "AutoModelForCausalLM"
        tag = "text-generation"
    elif architectures == [family.scorer]:
        loader = "AutoModelForSequenceClassification"
        tag = "text-classification"
    rows = [
        ("Architecture", ", ".join(architectures)),
        ("Parameters", f"{parameter_count(spec):,}"),
        ("Layers × width", f"{spec.layers} × {spec.hidden}"),
        ("Query heads, key/value heads × width", f"{spec.heads}, {spec.kv_heads} × {spec.head_dim}"),
        ("Vocabulary", f"{spec.vocab_size:,}"),
        ("Context", f"{spec.max_seq_len:,} tokens"),
        ("Weights stored as", dtype),
    ]
    table = "\n".join(f"| {label} | {value} |" for label, value in rows)
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: {tag}\ntags: [meshwright]\n---\n\n"
        f"# {title}\n\n| | |\n|---|---|\n{table}\n\n## Training\n\n{run_note.strip()}\n\n## Use\n\n"
        f"```python\nfrom transformers import {loader}, AutoTokenizer\n\n"
        f'model = {loader}.from_pretrained("{folder}")  # this folder\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")\n```\n\n'
        f"## Limits\n\n{limits} {OF_SCORES if spec.head == 'score' else OF_TEXTS} No evaluation comes with this folder.\n"
    )
