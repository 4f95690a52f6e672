"""Describes the tensors of a Hugging Face folder, and converts between its config.json and a ModelSpec, by the rules of its family."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from meshwright.families.format import WITHOUT_EFFECT, Family, HFConfig
from meshwright.families.missing import lacks
from meshwright.families.quantization import KEY, Quantization, read_quantization
from meshwright.families.registry import FAMILIES
from meshwright.families.text_part import Nesting, nesting, text_config
from meshwright.spec.dimension_checks import check_dimensions
from meshwright.spec.errors import BadInput, Damaged, MeshwrightError, nearest, shorten
from meshwright.spec.fields import from_plain
from meshwright.spec.folder_files import read_folder_json
from meshwright.spec.foreign_words import no_folder_hint
from meshwright.spec.model import SCORE, KindSpec, ModelSpec, ParameterSpec, parameters, without_adapter

DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
"""Names of the dtypes in config.json, by the names of this project."""
_COMPARED = 1 << 16
"""Bytes at the beginning of the head and of the embedding that are compared to find whether the folder ties them."""
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError, MeshwrightError)
"""Errors of files that are missing, damaged or malformed."""


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face folder. It contains rows of one of our parameters, taken as a matrix.

    For stacked experts, all dimensions of the parameter except the last are counted as rows: `(experts, out, in)` has
    experts · out rows.
    """

    name: str
    """Its name in the folder."""
    first_row: int
    """First row of the parameter that it contains."""
    row_count: int
    """Number of rows that it contains."""
    shape: tuple[int, ...]
    """Its shape in the folder."""
    transposed: bool
    """Whether it is stored as (in, out), so that rows of the parameter are its columns. If stacked, this applies to each expert."""
    precise: bool = False
    """Whether it is stored in fp32, whatever the dtype of the folder."""
    stacked: bool = False
    """Whether it contains all experts of a layer, along dimension 0."""
    one_row: bool = False
    """Whether it is a vector that is stored as a matrix of one row."""
    interleaved: bool = False
    """Whether its outputs alternate between gate and up projection."""


def hf_tensors(spec: ModelSpec, place: Nesting | None = None) -> dict[str, tuple[HFTensor, ...]]:
    """Return for each of our parameters the tensors of the folder that contain it, in the order of their rows.

    `place` is where a folder has the tensors of its text part. The names in the result are always those of a folder of
    the text model alone; `place.name` translates them.
    """
    family = FAMILIES[spec.family] if place is None else place.layout(FAMILIES[spec.family])
    return {parameter.name: tuple(_tensors_of(family, spec, parameter)) for parameter in parameters(spec)}


def prediction_copies(spec: ModelSpec) -> dict[str, tuple[HFTensor, ...]]:
    """Return the tensors of a folder that are copies of a parameter, by the parameter's name.

    Each layer that predicts a further token has its own copy of the embedding and of the head.
    """
    family = FAMILIES[spec.family]
    shape = (spec.vocab_size, spec.hidden)
    copies: dict[str, tuple[HFTensor, ...]] = {}
    for module, name in family.prediction_copies.items():
        source = "embed.weight" if spec.tied else f"{module}.weight"
        prefixes = (family.layer.format(layer=spec.layers + depth) for depth in range(spec.prediction_depth))
        further = (HFTensor(f"{prefix}{name}.weight", 0, shape[0], shape, False) for prefix in prefixes)
        copies[source] = (*copies.get(source, ()), *further)
    return copies


ONE_LABEL = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
"""Keys that the config.json of a reward model has in addition. It has one score, so one label."""
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of special tokens in config.json."""


def to_hf_config(
    spec: ModelSpec, *, dtype: str = "bf16", special_ids: Mapping[str, int | list[int] | None] | None = None
) -> dict[str, Any]:
    """Return the config.json of a model, with the keys of transformers 4 and of transformers 5.

    `special_ids` maps keys of special tokens to ids. Raises BadInput if the architecture of the family cannot express a
    field.
    """
    family = FAMILIES[spec.family]
    spec = without_adapter(spec)
    if obstacle := export_obstacle(spec):
        raise BadInput(f"{obstacle}; Meshwright's own checkpoints can hold this model")
    return {
        "architectures": [_architecture(family, spec)],
        "model_type": family.model_type,
        **family.to_config(spec),
        **(ONE_LABEL if spec.head == "score" else {}),
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied,
        **dict.fromkeys(SPECIAL_IDS),
        **(special_ids or {}),
        "use_cache": True,
        "torch_dtype": DTYPE_NAMES[dtype],
        "dtype": DTYPE_NAMES[dtype],
    }


def to_whole_config(
    config: Mapping[str, Any],
    spec: ModelSpec,
    *,
    dtype: str = "bf16",
    special_ids: Mapping[str, int | list[int] | None] | None = None,
) -> dict[str, Any]:
    """Adapt `config`, the config.json of a folder with a text part, to other weights of its text model.

    The other arguments are as in `to_hf_config`. Raises BadInput if `spec` is another text model than `config`
    describes. Only its longest sequence, its `init_std` and its tying may differ.
    """
    found, _ = from_hf_config(config)
    free = {key: getattr(spec, key) for key in ("max_seq_len", "init_std", "tied")}
    before = replace(from_plain(ModelSpec, found), **free, prediction_depth=0)
    if key := _different_key(spec, before):
        raise BadInput(
            f"model.{key}: the folder that the run began with has a text part with {getattr(before, key)!r}, got "
            f"{shorten(repr(getattr(spec, key)))}; add --text-only for a folder of the text model"
        )
    whole = dict(config)
    parts = [whole]
    if isinstance(config.get("text_config"), Mapping):
        whole["text_config"] = dict(config["text_config"])
        parts.append(whole["text_config"])
    if found["max_seq_len"] != spec.max_seq_len:
        parts[-1]["max_position_embeddings"] = spec.max_seq_len
    for part in parts:
        part.pop(KEY, None)  # The weights that are written are not quantised.
        part["tie_word_embeddings"] = spec.tied
        part.update((key, DTYPE_NAMES[dtype]) for key in ("torch_dtype", "dtype") if key in part)
        part.update((key, ids) for key, ids in (special_ids or {}).items() if key in part or part is whole)
    return whole


def export_obstacle(spec: ModelSpec) -> str | None:
    """Return why a folder of the model's family cannot hold the model, and which families could. None if it can."""
    spec = without_adapter(spec)  # Adapters are merged into the weights of a folder.
    if (obstacle := _obstacle(FAMILIES[spec.family], spec)) is None:
        return None
    able = [name for name, family in FAMILIES.items() if _obstacle(family, spec) is None]
    return obstacle + (f" (model.family: {' or '.join(able)} can)" if able else "")


def _obstacle(family: Family, spec: ModelSpec) -> str | None:
    """Return why the config.json that the family writes for this model would describe another model. None if it describes this model."""
    spec = replace(spec, vocab_size=spec.vocab_size or 1)  # The vocabulary is 0 until the tokenizer is known.
    try:
        written = {
            **family.to_config(spec),
            "architectures": [_architecture(family, spec)],
            "vocab_size": spec.vocab_size,
        }
        written["tie_word_embeddings"] = spec.tied
        read = from_plain(ModelSpec, _fields(family, HFConfig(written, "config.json")))
    except BadInput as error:
        return str(error)
    if (key := _different_key(spec, replace(read, family=spec.family))) is None:
        return None
    if key == "blocks":
        return f"model.blocks: the layers of a {family.architecture} folder cannot differ in this way"
    value = getattr(spec, key)
    theirs = getattr(read, key)
    return f"model.{key}: a {family.architecture} folder supports only {theirs!r}, got {shorten(repr(value))}"


def _different_key(spec: ModelSpec, other: ModelSpec) -> str | None:
    """Return the first key by which `spec` is another model than `other`. None if both are the same model."""
    equal_layers = LAYER_KEYS if _blocks(other) == _blocks(spec) else ()
    for field in fields(ModelSpec):
        value = getattr(other, field.name)
        if field.name in equal_layers or getattr(spec, field.name) == value:
            continue
        if field.name == "blocks" or _has_effect(spec, field.name, value):
            return field.name
    return None


LAYER_KEYS = (
    "blocks",
    "pattern",
    "first",
    "sequence",
    *(field.name for field in fields(KindSpec) if field.name != "routed"),
)
"""Keys of ModelSpec that only describe the layers. Two specs may have different values here and still have the same layers."""
KEYS_OF_SOME_BLOCKS = ("ffn_hidden", "rope_theta", "normalised_routing", "experts_per_token", "expert_hidden")
"""Keys that not all blocks use. A run may give them even if no block of its model does."""


def _has_effect(spec: ModelSpec, name: str, value: Any) -> bool:
    """Return whether the model would be another one with `value` under this key."""
    other = replace(spec, **{name: value})
    return name not in KEYS_OF_SOME_BLOCKS or _blocks(other) != _blocks(spec)


def _blocks(spec: ModelSpec) -> tuple[Any, ...]:
    return spec.block_kinds, spec.layer_kinds


def _fields(family: Family, config: HFConfig) -> dict[str, Any]:
    """Return the plain ModelSpec fields of a config.json. Raises BadInput for a key or value that the family does not support."""
    found = family.from_config(config)
    tied = config.flag("tie_word_embeddings", family.values.get("tied", False))
    config.expect("is_encoder_decoder", False)
    config.expect("add_cross_attention", False)
    config.refuse_unknown(WITHOUT_EFFECT | family.without_effect)
    if not _scores(family, config.values):
        return {"family": family.model_type, **family.values, **found, "tied": tied}
    labels = config.get("id2label") or dict.fromkeys(range(config.integer("num_labels", default=1)))
    if len(labels) != 1:
        raise config.error("id2label", labels, "one label: a reward model gives one score")
    return {"family": family.model_type, **family.values, **found, "tied": False, "head": "score"}


def _architecture(family: Family, spec: ModelSpec) -> str:
    """Return the class of transformers for the model. Raises BadInput if the model gives a score and transformers has no such class."""
    if spec.head != "score":
        return family.architecture
    if family.scorer is None:
        raise BadInput(f"model.head: transformers has no {family.model_type} model with a score, got 'score'")
    return family.scorer


def _scores(family: Family, config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes a model with a head for scores."""
    return family.scorer is not None and config.get("architectures") == [family.scorer]


def from_hf_config(config: Mapping[str, Any], where: str = "config.json") -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the plain ModelSpec fields of a config.json, or of its text part, and notes on keys that are not used.

    Raises BadInput, with file, key and value, for a feature that the decoder lacks.
    """
    config, where = text_config(config, where) or (config, where)
    family = _family_of(config, where)
    reader = HFConfig(config, where)
    reader.get(KEY)
    read_quantization(config, where)
    found = _fields(family, reader)
    check_dimensions(from_plain(ModelSpec, found), where)
    return found, tuple(reader.notes)


def folder_spec(folder: Path) -> dict[str, Any]:
    """Return the plain ModelSpec fields of a Hugging Face folder. Raises the errors of `folder_fields`."""
    return folder_fields(folder)[0]


def folder_fields(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the plain ModelSpec fields of a Hugging Face folder, and notes.

    They come from config.json and from the names of the tensors.

    The tensors are needed for two fields:

    - `prediction_depth`: transformers keeps `num_nextn_predict_layers` in config.json even if it leaves out the weights
      of these layers. If the tensors are missing, the depth is 0.
    - `tied` of a text part: config.json cannot be trusted, because the default of the whole model differs from that of
      the text model. It is tied if there is no head, or if config.json says so and the head equals the embedding.

    Raises BadInput if config.json is missing or describes a feature that the decoder lacks, and Damaged if it is not
    JSON.
    """
    where = folder / "config.json"
    config = read_json(where)
    found, notes = from_hf_config(config, str(where))
    files = _tensor_files(folder)
    if files and text_config(config, str(where)) is not None:
        family = FAMILIES[found["family"]]
        place = _nesting(folder, family, files)
        embedding, head = (place.name(family, f"{family.ends[end]}.weight") for end in ("embed", "head"))
        same = head not in files or _beginning(folder, files, head) == _beginning(folder, files, embedding)
        found = {**found, "tied": same and (found["tied"] or head not in files)}
    depth = found.get("prediction_depth")
    layers = found["layers"]
    if not depth or not files or any(f"layers.{layers}." in name for name in files):
        return found, notes
    note = f"{where}: num_nextn_predict_layers {depth} is not used: the folder has no tensors of these layers"
    return {**found, "prediction_depth": 0}, (*notes, note)


def folder_nesting(folder: Path) -> Nesting | None:
    """Return where a folder has the tensors of its text part.

    None if it is a folder of a text model. Raises BadInput if there are none.
    """
    config = read_json(folder / "config.json")
    where = str(folder / "config.json")
    if (found := text_config(config, where)) is None:
        return None
    return _nesting(folder, _family_of(*found), _tensor_files(folder))


def _nesting(folder: Path, family: Family, files: Mapping[str, str]) -> Nesting:
    """Return where a folder has the tensors of its text part. `files` maps the name of each tensor to its file."""

    def shape(name: str) -> tuple[int, ...]:
        try:
            return tuple(_header(folder / files[name])[0][name]["shape"])
        except _UNREADABLE as error:
            raise Damaged(f"{folder}: the shape of {name} cannot be read ({error!r}); copy the folder again") from error

    return nesting(family, files, str(folder), shape)


MODELOPT = "hf_quant_config.json"
"""File with the quantisation settings of ModelOpt, in folders whose config.json has none."""


def folder_quantization(folder: Path) -> Quantization | None:
    """Return what a folder says about quantised weights, in config.json or in ModelOpt's own file. None if it says nothing.

    Raises BadInput as `read_quantization` does.
    """
    where = folder / "config.json"
    config = read_json(where)
    found, place = text_config(config, str(where)) or (config, str(where))
    if not found.get(KEY) and (folder / MODELOPT).is_file():
        place = str(folder / MODELOPT)
        section = read_json(folder / MODELOPT).get("quantization")
        found = {KEY: {"quant_method": "modelopt", **section} if isinstance(section, Mapping) else section}
    return read_quantization(found, place)


def _tensor_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor in the folder's safetensors files.

    Empty if the index, or the header of the only file, cannot be read.
    """
    try:
        if (index := folder / "model.safetensors.index.json").is_file():
            return dict(read_json(index)["weight_map"])
        return dict.fromkeys(_header(folder / "model.safetensors")[0], "model.safetensors")
    except _UNREADABLE:
        return {}


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the table of contents of a safetensors file, and the byte at which its first tensor begins."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(length)), 8 + length


def _beginning(folder: Path, files: Mapping[str, str], name: str) -> bytes | None:
    """Return the first bytes of a tensor, to compare two weights. None if they cannot be read; opening the weights will report that."""
    try:
        table, start = _header(folder / files[name])
        first, last = table[name]["data_offsets"]
        with (folder / files[name]).open("rb") as opened:
            opened.seek(start + first)
            return opened.read(min(last - first, _COMPARED))
    except _UNREADABLE:
        return None


def gguf_hint(path: Path) -> str:
    """Return a hint on what to use instead if `path` is a GGUF file or a folder of them. Otherwise empty."""
    inside = sorted(path.glob("*.gguf")) if path.is_dir() else []
    found = [path] if path.suffix == ".gguf" else inside
    return f"; {found[0].name} is GGUF, which is not read: take the folder from which it was made" if found else ""


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file of a Hugging Face folder. Raises BadInput if there is no such file, Damaged if it is not JSON."""
    if path.parent.is_file():
        raise BadInput(
            f"{path.parent}: is a file; expected a Hugging Face folder with {path.name} and safetensors weights"
            f"{gguf_hint(path.parent)}"
        )
    if not path.is_file():
        hint = no_folder_hint(str(path.parent)) or gguf_hint(path.parent)
        raise BadInput(f"{path}: no such file; expected a Hugging Face folder, which holds {path.name}{hint}")
    value = read_folder_json(path, hint="; copy the file again from its source")
    if not isinstance(value, dict):
        raise Damaged(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a config.json. Raises BadInput if the model type or the architecture is not supported."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        if (missing := lacks(str(model_type))) is not None:
            raise BadInput(f"{where}: model_type: {model_type!r} has {missing}, which this decoder does not compute")
        near = nearest(str(model_type), FAMILIES)
        hint = f" (nearest: {near})" if near else ""
        raise BadInput(f"{where}: model_type: expected one of {', '.join(FAMILIES)}, got {model_type!r}{hint}")
    architectures = config.get("architectures")
    if architectures and architectures != [family.architecture] and not _scores(family, config):
        scorer = "" if family.scorer is None else f" or [{family.scorer!r}]"
        raise BadInput(f"{where}: architectures: expected [{family.architecture!r}]{scorer}, got {architectures!r}")
    return family


def _tensors_of(family: Family, spec: ModelSpec, parameter: ParameterSpec) -> list[HFTensor]:
    """Return the tensors of a folder that contain `parameter`, in the order of their rows."""
    if parameter.expert:
        return _experts_of(family, spec, parameter)
    if parameter.name == SCORE:
        return [HFTensor("score.weight", 0, 1, parameter.shape, False)]
    module = parameter.module
    weight_or_bias = parameter.name.rpartition(".")[2]
    prefix = ""
    names = (family.ends.get(module, ""),)
    if parameter.inside:
        prefix = _prefix_of(family, spec, parameter)
        if single := family.tensors(spec).get(f"{module}.{weight_or_bias}"):
            one_row = f"{module}.{weight_or_bias}" in family.one_row
            shape = (1, *parameter.shape) if one_row else parameter.shape
            return [HFTensor(prefix + single, 0, parameter.shape[0], shape, False, parameter.precise, one_row=one_row)]
        outside_block = parameter.predicts and module in family.predictions
        names = (family.predictions[module],) if outside_block else family.modules[module]
    sizes = [size for _, size in parameter.blocks] if len(names) > 1 else [parameter.shape[0]]
    transposed = module in family.transposed and weight_or_bias == "weight"
    tensors = []
    first = 0
    for name, size in zip(names, sizes, strict=True):
        shape = (size, *parameter.shape[1:])
        tensors.append(
            HFTensor(f"{prefix}{name}.{weight_or_bias}", first, size, shape[::-1] if transposed else shape, transposed)
        )
        first += size
    return tensors


def _prefix_of(family: Family, spec: ModelSpec, parameter: ParameterSpec) -> str:
    """Return the prefix of the names of a block's tensors. Prediction modules are numbered after the layers."""
    number = int(parameter.name.split(".")[1])
    return family.layer.format(layer=number + spec.layers * parameter.predicts)


def _experts_of(family: Family, spec: ModelSpec, parameter: ParameterSpec) -> list[HFTensor]:
    """Return the tensors of a layer's experts in a folder.

    Usually there are two for each expert's first matrix: gate and up projection.
    """
    attribute = parameter.name.rpartition(".")[2]
    prefix = _prefix_of(family, spec, parameter)
    names = family.modules[f"moe.experts.{attribute}"]
    if "{expert}" not in names[0]:
        return [_stacked_experts(family, parameter, attribute, prefix + names[0])]
    experts, rows, inputs = parameter.shape
    size = rows // len(names)
    tensor_names = [name.format(expert=expert) for expert in range(experts) for name in names]
    return [
        HFTensor(f"{prefix}{name}.weight", index * size, size, (size, inputs), False)
        for index, name in enumerate(tensor_names)
    ]


def _stacked_experts(family: Family, parameter: ParameterSpec, attribute: str, name: str) -> HFTensor:
    """Return the tensor of a folder that stacks the experts of a layer: `(experts, out, in)`, or `(experts, out)` for a bias."""
    module = f"moe.experts.{attribute.removesuffix('_bias')}"
    transposed = module in family.transposed and len(parameter.shape) == 3
    shape = parameter.shape
    if transposed:
        shape = (shape[0], shape[2], shape[1])
    rows = math.prod(parameter.shape[:-1])
    return HFTensor(name, 0, rows, shape, transposed, stacked=True, interleaved=module in family.interleaved)
