"""Reads and writes adapters in peft's files: `adapter_config.json` and `adapter_model.safetensors`.

peft (huggingface/peft) stores a layer's A as `base_model.model.NAME.lora_A.weight`, and its B as `….lora_B.weight`. NAME is
the layer's name in the model's folder. A key of adapter_config.json that this program does not know may change what is
computed. So it is refused unless its value is empty.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint.models.adapters import Delta, Deltas, placed_parts
from meshwright.durable.writes import write_durable
from meshwright.families.adapters import shortened
from meshwright.families.folder import HFTensor, hf_tensors, read_json
from meshwright.families.registry import FAMILIES
from meshwright.spec.errors import BadInput, Damaged, nearest, shorten
from meshwright.spec.model import SCORE, ModelSpec, with_score, without_adapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The beginning of all tensor names in peft's files."""
DIGEST = "meshwright_base"
"""Key of the base's digest in the metadata of the weights' file. peft does not read it."""
WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "megatron_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
        # How adapters were initialised; their values are in the file.
        "corda_config",
        "eva_config",
        "init_lora_weights",
        "loftq_config",
        "lora_ga_config",
        # Which layers have adapters; the names of the tensors say it.
        "ensure_weight_tying",
        "exclude_modules",
        "layers_pattern",
        "layers_to_transform",
        "target_modules",
        # Only read with `use_qalora`, which is refused.
        "qalora_group_size",
    }
)
"""Keys of adapter_config.json that do not change what a stored adapter computes."""
READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "fan_in_fan_out",
        "lora_alpha",
        "lora_dropout",
        "modules_to_save",
        "r",
        "rank_pattern",
        "use_dora",
        "use_rslora",
    }
)
"""Keys of adapter_config.json that this program reads."""


@dataclass(frozen=True)
class StoredAdapter:
    """The adapters in a folder, for one model."""

    deltas: Deltas
    base: str | None
    """Digest of the base with which they were trained, if this program wrote them; else None."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about settings that are not used."""


def read_peft(folder: Path, spec: ModelSpec) -> StoredAdapter:
    """Return the adapters in a folder that peft or this program wrote, for the model `spec`.

    Raises BadInput for a setting or a tensor that the model has no place for, and Damaged for unreadable files.
    """
    config = _read_config(folder / CONFIG)
    notes = []
    if config.get("lora_dropout"):
        notes.append(
            f"{folder / CONFIG}: lora_dropout {config['lora_dropout']} is not used: adapters are applied without dropout"
        )
    path = folder / WEIGHTS
    if not path.is_file():
        raise BadInput(f"{path}: no such file; expected the weights of adapters as safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{path}: cannot be read ({error}); copy the file again") from error
    if f"{PREFIX}score.weight" in tensors:
        spec = with_score(spec)
    deltas = _deltas(tensors, without_adapter(spec), config, path)
    return StoredAdapter(deltas, metadata.get(DIGEST), tuple(notes))


def write_peft(
    folder: Path, spec: ModelSpec, read: Callable[[str], Tensor], *, base_name: str, base: str | None
) -> None:
    """Write the adapters of `spec` as a folder that peft loads. `read(name)` returns a parameter of the adapters.

    `base_name`: the base model's folder, for peft's `base_model_name_or_path`. `base`: the digest of its weights, or None.
    Tensors keep their dtype. Raises BadInput if `folder` exists and is not empty, or if peft's files cannot represent
    the adapters (of stacked experts).
    """
    adapter = spec.adapter
    names = _layers(without_adapter(spec))
    assert adapter is not None
    tensors: dict[str, Tensor] = {}
    targets: dict[str, None] = {}
    by_place = {(weight, part.first_row, part.row_count): name for name, (weight, part) in names.items()}
    read = lru_cache(maxsize=8)(read)  # experts share parameters
    for placed in placed_parts(spec):
        target = by_place.get((placed.weight, placed.first_row, placed.part.outputs))
        if target is None:
            raise BadInput(
                f"{placed.weight}: a {spec.family} folder stacks its experts, and peft's files have no place for their adapters"
            )
        layer = PREFIX + target
        targets[target] = None
        tensors[f"{layer}.lora_A.weight"] = placed.value(read, "a")
        tensors[f"{layer}.lora_B.weight"] = placed.value(read, "b")
        if adapter.kind == "dora":
            tensors[f"{layer}.lora_magnitude_vector"] = placed.value(read, "magnitude")
    if spec.head == "score":
        tensors[f"{PREFIX}score.weight"] = read(SCORE)
    config = {
        "base_model_name_or_path": base_name,
        "bias": "none",
        "fan_in_fan_out": bool(FAMILIES[spec.family].transposed),
        "inference_mode": True,
        "lora_alpha": _plain_number(adapter.alpha),
        "lora_dropout": 0.0,
        "modules_to_save": ["score"] if spec.head == "score" else None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "target_modules": list(shortened(targets, (name for name in names if name not in targets))),
        "task_type": "SEQ_CLS" if spec.head == "score" else "CAUSAL_LM",
        "use_dora": adapter.kind == "dora",
        "use_rslora": adapter.kind == "rslora",
    }
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder}: already there and not empty; choose another folder or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"} | ({} if base is None else {DIGEST: base})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, metadata=metadata)
    # The config is written last, because it makes the folder one that can be loaded.
    write_durable(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _plain_number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _read_config(path: Path) -> dict[str, Any]:
    """Return the contents of adapter_config.json. Raises BadInput for values that this program cannot follow."""
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise BadInput(f"{path}: peft_type: expected 'LORA', got {config.get('peft_type')!r}")
    if config.get("bias", "none") != "none":
        raise BadInput(f"{path}: bias: expected 'none', as biases are not trained, got {config['bias']!r}")
    for key, value in config.items():
        if key not in READ and key not in WITHOUT_EFFECT and value not in (None, False, {}, [], 0):
            near = nearest(key, READ)
            hint = f" (nearest: {near})" if near else ""
            raise BadInput(
                f"{path}: {key}: expected a key that this program reads, got {shorten(repr(value))}, which may change what "
                f"the adapters compute{hint}"
            )
    for key in ("rank_pattern", "alpha_pattern"):
        _check_pattern(config.get(key), f"{path}: {key}")
    for key in ("r", "lora_alpha"):
        if not isinstance(config.get(key), int | float) or not config[key] > 0:
            raise BadInput(f"{path}: {key}: expected a positive number, got {config.get(key)!r}")
    return config


def _check_pattern(patterns: Any, where: str) -> None:
    """Raise BadInput unless `patterns` is None, or a table of regular expressions with positive numbers."""
    if patterns is None:
        return
    if not isinstance(patterns, Mapping):
        expected = "regular expressions of layers' names, each with a positive number"
        raise BadInput(f"{where}: expected {expected}, got {shorten(repr(patterns))}")
    for key, value in patterns.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise BadInput(f"{where}.{key}: expected a positive number, got {shorten(repr(value))}")
        try:
            re.compile(key)
        except re.error as error:
            raise BadInput(
                f"{where}: expected a regular expression of layers' names, got {shorten(key)} ({error})"
            ) from error


def _layers(spec: ModelSpec) -> dict[str, tuple[str, HFTensor]]:
    """Return every matrix of the model's folder by its name without `.weight`: our parameter, and the rows that it has."""
    return {
        part.name.removesuffix(".weight"): (parameter, part)
        for parameter, parts in hf_tensors(spec).items()
        for part in parts
        if len(part.shape) == 2
    }


def _deltas(tensors: Mapping[str, Tensor], spec: ModelSpec, config: Mapping[str, Any], path: Path) -> Deltas:
    """Return the adapters in `tensors`, the contents of `path`, by the name of our parameter."""
    layers = _layers(spec)
    by_layer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, kind = _split(name, path)
        by_layer.setdefault(layer, {})[kind] = tensor
    deltas: dict[str, list[Delta]] = {}
    for layer, own in by_layer.items():
        if layer not in layers:
            near = nearest(layer, layers)
            hint = f" (nearest: {near})" if near else ""
            raise BadInput(f"{path}: {layer} is no linear layer of this {spec.family} model{hint}")
        parameter, part = layers[layer]
        deltas.setdefault(parameter, []).append(_delta(own, layer, part, config, path))
    return deltas


def _split(name: str, path: Path) -> tuple[str, str]:
    """Return the layer of a tensor's name, and which of the layer's tensors it is.

    The second value is `lora_A`, `lora_B`, `lora_magnitude_vector`, or `saved` for a whole weight.
    """
    match = re.fullmatch(
        re.escape(PREFIX) + r"(?P<layer>.+?)\.(?P<kind>lora_A\.weight|lora_B\.weight|lora_magnitude_vector|weight)",
        name,
    )
    if match is None or ".base_layer" in name:
        raise BadInput(
            f"{path}: tensor {name}: expected the A, B or magnitude of a linear layer, or a whole weight of modules_to_save"
        )
    kind = match["kind"]
    return match["layer"], "saved" if kind == "weight" else kind.removesuffix(".weight")


def _delta(own: Mapping[str, Tensor], layer: str, part: HFTensor, config: Mapping[str, Any], path: Path) -> Delta:
    """Return the adapter of one layer from its tensors `own`. `part` says which rows of our parameter the layer is."""
    outputs, inputs = part.shape[::-1] if part.transposed else part.shape
    if "saved" in own:
        saved = own["saved"]
        if tuple(saved.shape) != part.shape:
            raise Damaged(f"{path}: {layer}.weight has shape {tuple(saved.shape)}, expected {part.shape}")
        return Delta(part.first_row, saved.t() if part.transposed else saved, torch.empty(0), 1.0, replaces=True)
    for name, shape in (("lora_A", (None, inputs)), ("lora_B", (outputs, None))):
        if name not in own:
            raise Damaged(f"{path}: {layer} has no {name}")
        found = tuple(own[name].shape)
        if len(found) != 2 or any(want not in (None, got) for want, got in zip(shape, found, strict=True)):
            raise Damaged(f"{path}: {layer}.{name} has shape {found}, expected {shape}")
    a = own["lora_A"]
    b = own["lora_B"]
    rank = int(_of_pattern(config.get("rank_pattern"), layer, config["r"]))
    if a.shape[0] != rank or b.shape[1] != rank:
        raise Damaged(f"{path}: {layer} has an adapter of rank {a.shape[0]}, and {CONFIG} says {rank}")
    alpha = float(_of_pattern(config.get("alpha_pattern"), layer, config["lora_alpha"]))
    if bool(config.get("use_dora")) != ("lora_magnitude_vector" in own):
        raise Damaged(f"{path}: {layer}: use_dora is {bool(config.get('use_dora'))} in {CONFIG}, unlike its tensors")
    magnitude = own.get("lora_magnitude_vector")
    if magnitude is not None and tuple(magnitude.shape) != (outputs,):
        raise Damaged(
            f"{path}: {layer}.lora_magnitude_vector has shape {tuple(magnitude.shape)}, expected {(outputs,)}"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Delta(part.first_row, a, b, scale, magnitude)


def _of_pattern(patterns: Mapping[str, Any] | None, layer: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a layer's name, else `default`.

    As in peft, a pattern is a regular expression for the end of the name.
    """
    matches: Iterator[Any] = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", layer))
    return next(matches, default)
