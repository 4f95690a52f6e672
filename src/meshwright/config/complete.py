"""What follows from the keys of a run: its name, its cluster, the model's dimensions, a sequence length that fits the model."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.config.family_dimensions import DIMENSIONS, EXPERT_DIMENSIONS, FAMILY_VALUES, ffn_width
from meshwright.config.presets import MODEL_PRESETS, run_preset
from meshwright.config.value_sources import EMBEDDED, Detect, merged
from meshwright.config.yaml_positions import Document, KeyPath, Place, read_yaml, say
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import BadInput, nearest
from meshwright.spec.fields import to_plain
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec

ModelReader = Callable[[Path], dict[str, Any]]
_DERIVED = ("ffn_hidden", "kv_heads", "head_dim")


def complete(document: Document, stem: str, runs: Path, detect: Detect, model_reader: ModelReader | None) -> list[str]:
    """Adds to `document` what a run may leave out because it follows from the rest; returns a sentence for each assumption."""
    if document.data.get("name") is None:
        document.put(("name",), stem, document.top)
    for section in ("model", "train"):
        if section not in document.data:
            document.data[section] = {}
    _spell_chips(document)
    _follow_question(document)
    notes = _complete_cluster(document, detect)
    if not isinstance(document.data["model"], dict):
        return notes
    _find_run(document, runs)
    _take_dimensions(document, model_reader)
    notes += _complete_model(document)
    _fit_sequence(document)
    _fit_warmup(document)
    return notes


def _follow_question(document: Document) -> None:
    """A preset or a chip that overrides name brings its own training defaults and node in place of the quick start's."""
    if document.top.file != EMBEDDED:
        return
    preset, chip = document.get(("model", "preset")), CHIPS.get(str(document.get(("cluster", "gpu"))))
    usual = run_preset(preset)["train"] if isinstance(preset, str) and preset in MODEL_PRESETS else {}
    values: dict[KeyPath, Any] = {("train", key): value for key, value in usual.items()}
    values |= {("cluster", "gpus_per_node"): chip.per_node} if chip else {}
    for path, value in values.items():
        assumed = not document.has(path) or document.value_place(path).file == EMBEDDED
        if assumed and isinstance(document.get(path[:-1]), dict):
            document.put(path, value, document.top)


def _complete_cluster(document: Document, detect: Detect) -> list[str]:
    """A cluster that names no devices is this machine's, as with `cluster: auto`; keys beside it replace single values."""
    cluster = document.data.setdefault("cluster", {})
    if not isinstance(cluster, dict) or cluster.get("gpu") is not None or ("cluster",) in document.rejected:
        return []
    assumed = {key: value for key, value in detect().items() if cluster.get(key) is None}
    for key, value in assumed.items():
        document.put(("cluster", key), value, Place("cluster=auto"))
    values = " ".join(f"{key}={value}" for key, value in assumed.items())
    return [f"no cluster.gpu: cluster=auto assumed, {values} on this machine"]


def _spell_chips(document: Document) -> None:
    """Chips' names in the table's letters: h100 is H100, and "rtx 4090" RTX4090."""
    names = {_plain(name): name for name in ("cpu", *CHIPS)}
    groups = document.get(("cluster", "groups"))
    for section in (document.get(("cluster",)), *(groups if isinstance(groups, list) else ())):
        if isinstance(section, dict) and (name := names.get(_plain(str(section.get("gpu"))))):
            section["gpu"] = name


def _plain(chip: str) -> str:
    """A chip's name without what people leave out or add."""
    return re.sub(r"[\s_-]", "", chip).upper()


def _find_run(document: Document, runs: Path) -> None:
    """`checkpoint:NAME` is the run of that name when no folder NAME is here."""
    kind, _, name = str(document.data["model"].get("init")).partition(":")
    plain = re.fullmatch(r"[\w.-]+", name)
    if kind == "checkpoint" and plain and not os.path.exists(name) and os.path.isdir(runs / name):
        document.data["model"]["init"] = f"checkpoint:{runs / name}"


def _take_dimensions(document: Document, model_reader: ModelReader | None) -> None:
    """Lays the given keys over the dimensions of the preset, or of the folder that the weights come from."""
    model = document.data["model"]
    if model.get("preset") is not None:
        path: KeyPath = ("model", "preset")
        preset = model["preset"]
        dimensions = MODEL_PRESETS.get(preset) if isinstance(preset, str) else None
        if dimensions is None:
            close = nearest(str(preset), MODEL_PRESETS)
            document.reject(path, f"a preset ({', '.join(MODEL_PRESETS)})", nearest=close)
    elif any(model.get(name) is None for name in (*DIMENSIONS, "ffn_hidden")):
        path = ("model", "init")
        dimensions = _dimensions_of_folder(document, str(model.get("init")), model_reader)
    else:
        return
    if path in document.rejected:
        document.rejected.update(("model", name) for name in (*DIMENSIONS, *EXPERT_DIMENSIONS, *_DERIVED))
    place = document.value_place(path)
    for name, value in (dimensions or {}).items():
        if name not in model:
            document.put(("model", name), value, place)
        elif isinstance(value, dict):
            model[name] = merged(value, model[name])


def _dimensions_of_folder(document: Document, init: str, model_reader: ModelReader | None) -> dict[str, Any] | None:
    kind, _, where = init.partition(":")
    folder = Path(where)
    if kind == "hf" and model_reader is not None:
        try:
            return to_plain(model_reader(folder))
        except BadInput as error:
            document.reject(("model", "init"), "hf:DIR, a Hugging Face model folder", str(error))
    if kind == "checkpoint":
        near = [place / "config.yaml" for place in (folder, *folder.parents[:2])]
        places = [file for file in near if os.path.isfile(file)]
        stored = read_yaml(places[0]).get(("model",)) if places else None
        if isinstance(stored, dict):
            return {f.name: stored[f.name] for f in dataclasses.fields(ModelSpec) if f.name in stored}
        document.reject(("model", "init"), "checkpoint:DIR in a run's folder, whose config.yaml tells the dimensions")
    return None


def _complete_model(document: Document) -> list[str]:
    """Adds the values of the model's family, then the dimensions that follow others by convention; says which in one sentence."""
    model = document.data["model"]
    family = str(model.get("family"))
    values = [item for item in FAMILY_VALUES.get(family, {}).items() if item[0] not in model]
    of_family = ", ".join(_put_beside(document, "family", name, value) for name, value in values)
    derived = ", ".join(
        filter(None, (_complete_ffn(document), _complete_kv_heads(document), _complete_head_dim(document)))
    )
    parts = [part for part in (of_family and f"{of_family} as {family} has them", derived) if part]
    return [f"model: {'; '.join([family, *parts])}"] if parts else []


def _complete_ffn(document: Document) -> str | None:
    model = document.data["model"]
    if model.get("ffn_hidden") is not None or not _counts(model.get("hidden")):
        return None
    width, formula = ffn_width(model["hidden"], model.get("mlp"))
    return f"{_put_beside(document, 'hidden', 'ffn_hidden', width)} = {formula}"


def _complete_kv_heads(document: Document) -> str | None:
    heads = document.data["model"].get("heads")
    if document.data["model"].get("kv_heads") is not None or heads is None:
        return None
    text = _put_beside(document, "heads", "kv_heads", heads)
    if _counts(heads):
        return f"{text} = heads"
    document.rejected.add(("model", "kv_heads"))
    return None


def _complete_head_dim(document: Document) -> str | None:
    model = document.data["model"]
    heads, hidden = model.get("heads"), model.get("hidden")
    if model.get("head_dim") is not None or heads is None or hidden is None:
        return None
    if _counts(heads) and _counts(hidden) and hidden % heads == 0:
        return f"{_put_beside(document, 'hidden', 'head_dim', hidden // heads)} = hidden / heads"
    if _counts(heads) and _counts(hidden):
        expected = f"a multiple of model.heads = {heads}, or model.head_dim beside it"
        document.reject(("model", "hidden"), expected, nearest=str(max(1, round(hidden / heads)) * heads))
    document.rejected.add(("model", "head_dim"))
    return None


def _put_beside(document: Document, given: str, name: str, value: Any) -> str:
    """Sets a model's key at the place of the key that it follows from; returns both in words."""
    document.put(("model", name), value, document.value_place(("model", given)))
    return f"{name} {say(value) if isinstance(value, bool) else value}"


def _fit_sequence(document: Document) -> None:
    """Left out, `train.seq_len` is its default or the model's longest sequence, whichever is less."""
    longest, train = document.data["model"].get("max_seq_len"), document.data["train"]
    usual = next(f.default for f in dataclasses.fields(TrainSpec) if f.name == "seq_len")
    if isinstance(train, dict) and "seq_len" not in train and _counts(longest) and longest < usual:
        document.put(("train", "seq_len"), longest, document.value_place(("model", "max_seq_len")))


def _fit_warmup(document: Document) -> None:
    """The quick start's own warm-up is a tenth of the steps when an override makes the run shorter than it."""
    path: KeyPath = ("train", "warmup_steps")
    steps, warmup = document.get(("train", "steps")), document.get(path)
    if document.value_place(path).file == EMBEDDED and _counts(steps) and warmup is not None and warmup >= steps:
        document.put(path, steps // 10, document.value_place(path))


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
