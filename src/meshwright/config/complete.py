"""Completes a run file: derives the run's name, cluster, model dimensions and sequence length from the keys that are given."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.config.adapter_rules import complete_adapter
from meshwright.config.family_dimensions import DIMENSIONS, ffn_width
from meshwright.config.presets import MODEL_PRESETS, PRESET_EXPECTED, run_preset
from meshwright.config.value_sources import EMBEDDED, Detect, merged
from meshwright.config.yaml_positions import KeyPath, Position, YamlDocument, format_value, read_yaml
from meshwright.families.registry import FAMILIES
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import MeshwrightError, nearest
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.folders import homes_of
from meshwright.spec.foreign_words import no_folder_hint
from meshwright.spec.job import EQUAL_LOADS, STEPS_OF_EPOCHS, TrainSpec, planned_sequences
from meshwright.spec.model import ModelSpec

ModelReader = Callable[[Path], dict[str, Any]]
"""Reads the folder of a model and returns its dimensions, as fields of ModelSpec."""
_DERIVED = ("ffn_hidden", "kv_heads", "head_dim")
"""Dimensions that follow from others by convention."""
FREE_BESIDE_WEIGHTS = ("max_seq_len", "rope_scaling", "yarn", "longrope", "prediction_depth", "init_std")
"""Dimensions that a run may change although it starts from weights: a longer context, fewer prediction modules."""
SCORE_HEAD: Mapping[str, Any] = {"head": "score", "tied": False}
"""Values of a reward model, whose head gives a score in place of logits."""


def complete(
    document: YamlDocument, stem: str, runs: Path, detect: Detect, model_reader: ModelReader | None
) -> list[str]:
    """Add derived values to `document` that a run file may leave out. Returns one sentence for each assumption.

    - `stem`: name of the run if the file gives none.
    - `runs`: folder in which `checkpoint:NAME` looks for the run NAME.
    - `detect`: finds the devices of this machine.
    - `model_reader`: reads a Hugging Face folder; None leaves `hf:` folders unread.
    """
    if document.data.get("name") is None:
        document.put(("name",), stem, document.top)
    for section in ("model", "train"):
        if section not in document.data:
            document.data[section] = {}
    _normalise_chip_names(document)
    _apply_preset_defaults(document)
    notes = _complete_cluster(document, detect)
    if not isinstance(document.data["model"], dict):
        return notes
    _resolve_run_name(document, runs)
    _put_score_head(document)
    notes += _take_dimensions(document, model_reader)
    notes += _complete_model(document)
    complete_adapter(document)
    _limit_sequence(document)
    complete_batch(document)
    _complete_epochs(document)
    _limit_warmup(document)
    _resolve_expert_load(document, runs)
    _resolve_lengths(document)
    return notes


def _apply_preset_defaults(document: YamlDocument) -> None:
    """If an override names a preset or a chip, replace the quick start's training settings and node size by those of the preset or chip.

    Values that the user gave stay.
    """
    if document.top.file != EMBEDDED:
        return
    preset = document.get(("model", "preset"))
    chip = CHIPS.get(str(document.get(("cluster", "gpu"))))
    default = run_preset(preset)["train"] if isinstance(preset, str) and preset in MODEL_PRESETS else {}
    values: dict[KeyPath, Any] = {("train", key): value for key, value in default.items()}
    values |= {("cluster", "gpus_per_node"): chip.per_node} if chip else {}
    for path, value in values.items():
        assumed = not document.has(path) or document.value_position(path).file == EMBEDDED
        if assumed and isinstance(document.get(path[:-1]), dict):
            document.put(path, value, document.top)


def _complete_cluster(document: YamlDocument, detect: Detect) -> list[str]:
    """If the cluster names no device, as with `cluster: auto`, use the devices of this machine. Keys that are given stay."""
    cluster = document.data.setdefault("cluster", {})
    if not isinstance(cluster, dict) or cluster.get("gpu") is not None or ("cluster",) in document.rejected:
        return []
    assumed = {key: value for key, value in detect().items() if cluster.get(key) is None}
    for key, value in assumed.items():
        document.put(("cluster", key), value, Position("cluster=auto"))
    values = " ".join(f"{key}={value}" for key, value in assumed.items())
    return [f"no cluster.gpu: cluster=auto assumed, {values} on this machine"]


def _normalise_chip_names(document: YamlDocument) -> None:
    """Write names of chips as in the table of chips: h100 becomes H100, "rtx 4090" becomes RTX4090."""
    names = {_plain(name): name for name in ("cpu", *CHIPS)}
    groups = document.get(("cluster", "groups"))
    for section in (document.get(("cluster",)), *(groups if isinstance(groups, list) else ())):
        if isinstance(section, dict) and (name := names.get(_plain(str(section.get("gpu"))))):
            section["gpu"] = name


def _plain(chip: str) -> str:
    """Return the name of a chip in capital letters, without spaces, dashes and underscores."""
    return re.sub(r"[\s_-]", "", chip).upper()


def _resolve_run_name(document: YamlDocument, runs: Path) -> None:
    """Replace `checkpoint:NAME` by the folder of the run NAME in `runs`, unless the current directory has a folder NAME."""
    for section, key in (("model", "init"), ("preference", "reference")):
        values = document.data.get(section)
        source, _, name = str(values.get(key) if isinstance(values, dict) else None).partition(":")
        plain = re.fullmatch(r"[\w.-]+", name)
        if source == "checkpoint" and plain and not os.path.exists(name) and os.path.isdir(runs / name):
            document.data[section][key] = f"checkpoint:{runs / name}"


def _put_score_head(document: YamlDocument) -> None:
    """With `preference.loss: reward`, give the model a head for scores, even if its initial weights have another head."""
    path: KeyPath = ("preference", "loss")
    if document.get(path) == "reward":
        for name, value in SCORE_HEAD.items():
            if name not in document.data["model"]:
                document.put(("model", name), value, document.value_position(path))


def _resolve_expert_load(document: YamlDocument, runs: Path) -> None:
    """Make the path of recorded expert loads absolute. If there is no such file but a run of this name, use the run's folder."""
    source = document.get(("train", "expert_load"))
    if not isinstance(source, str) or source in ("none", EQUAL_LOADS):
        return
    path = Path(os.path.expanduser(source))
    is_run = not os.path.exists(path) and len(path.parts) == 1 and os.path.isdir(runs / path)
    document.data["train"]["expert_load"] = os.path.abspath(runs / path if is_run else path)


def _resolve_lengths(document: YamlDocument) -> None:
    """Make the path of a histogram of lengths absolute."""
    path: KeyPath = ("data", "lengths")
    source = document.get(path)
    if isinstance(source, str) and source != "none":
        document.data["data"]["lengths"] = os.path.abspath(os.path.expanduser(source))


def _take_dimensions(document: YamlDocument, model_reader: ModelReader | None) -> list[str]:
    """Add the dimensions of the model that are not given.

    They come from the initial weights, otherwise from the preset.

    A given key or preset that differs from the initial weights is rejected. Only the dimensions in
    `FREE_BESIDE_WEIGHTS` may differ; the returned list has a sentence about those that do.
    """
    model = document.data["model"]
    free = _free(document)
    changed = []
    of_preset = _dimensions_of_preset(document)
    sufficient = of_preset is not None or all(model.get(name) is not None for name in (*DIMENSIONS, "ffn_hidden"))
    stored = _dimensions_of_weights(document, str(model.get("init")), model_reader, needed=not sufficient)
    if stored is not None:
        _reject_differences(document, stored, of_preset or {})
        changed = [
            f"{name} {_shown(model[name])} where {model['init']} has {_shown(stored.get(name))}"
            for name in free
            if name in model and name in stored and not _equal(model[name], stored[name])
        ]
    source = "init" if stored is not None or of_preset is None else "preset"
    if ("model", source) in document.rejected:
        required = (name for family in FAMILIES.values() for name in family.required)
        document.rejected.update(("model", name) for name in (*DIMENSIONS, *_DERIVED, *required))
    position = document.value_position(("model", source))
    for name, value in (stored or of_preset or {}).items():
        if name not in model:
            document.put(("model", name), value, position)
        elif isinstance(value, dict):
            model[name] = merged(value, model[name])
    return [f"model: {'; '.join(changed)}"] if changed else []


def _dimensions_of_preset(document: YamlDocument) -> dict[str, Any] | None:
    """Return the dimensions of the preset that `model.preset` names.

    None without one. An unknown name is rejected, and the result is empty.
    """
    preset = document.data["model"].get("preset")
    if preset is None:
        return None
    dimensions = MODEL_PRESETS.get(preset) if isinstance(preset, str) else None
    if dimensions is None:
        name = str(preset)
        expected = PRESET_EXPECTED
        if hint := no_folder_hint(name) or ("; that is a folder" if os.path.isdir(name) else ""):
            expected = f"{expected}, or weights as model.init=hf:DIR{hint}"
            name = name.rpartition("/")[2].lower()
        document.reject(("model", "preset"), expected, nearest=nearest(name, MODEL_PRESETS))
    return dimensions or {}


def _dimensions_of_weights(
    document: YamlDocument, init: str, model_reader: ModelReader | None, *, needed: bool
) -> dict[str, Any] | None:
    """Return all dimensions of the model whose weights `init` names. None for `scratch`, or if the weights cannot be read.

    Weights that cannot be read are rejected only if the dimensions are `needed`. Otherwise a plan can be made without
    reading them, and the check before a start reports the problem.
    """
    source, _, path = init.partition(":")
    folder = Path(path)
    if source == "hf" and model_reader is not None:
        try:
            return _inherited(to_plain(from_plain(ModelSpec, model_reader(folder))))
        except MeshwrightError as error:
            if needed:
                document.reject(("model", "init"), "hf:DIR, a Hugging Face model folder", str(error))
    if source == "checkpoint":
        stored = dimensions_of_run(folder)
        if stored is not None:
            return _inherited(stored)
        if needed:
            document.reject(("model", "init"), "checkpoint:DIR in a run's folder, whose config.yaml has the dimensions")
    return None


def dimensions_of_run(folder: Path) -> dict[str, Any] | None:
    """Return the dimensions of the model in a run's folder, or in a checkpoint of a run. None if `folder` is neither."""
    configs = [home / "config.yaml" for home in homes_of(folder) if os.path.isfile(home / "config.yaml")]
    stored = read_yaml(configs[0]).get(("model",)) if configs else None
    if not isinstance(stored, dict):
        return None
    return {f.name: stored[f.name] for f in dataclasses.fields(ModelSpec) if f.name in stored}


def _inherited(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the dimensions that a run takes over from weights.

    Two fields are left out: `init_std`, because no initial weights are drawn, and `adapter`, because adapters are
    merged into the weights.
    """
    return {name: value for name, value in stored.items() if name not in ("init_std", "adapter")}


def _reject_differences(document: YamlDocument, stored: dict[str, Any], of_preset: dict[str, Any]) -> None:
    """Reject each given key that differs from the dimensions of the initial weights, and a preset that differs from them."""
    model = document.data["model"]
    free = _free(document)
    weights = model["init"]
    for name, value in stored.items():
        if name in model and name not in free and not _equal(model[name], value):
            document.reject(("model", name), f"{_shown(value)}, which {weights} has, or no {name} beside it")
    differing = [
        f"{name} {_shown(value)} where the weights have {_shown(stored[name])}"
        for name, value in of_preset.items()
        if name in stored and name not in (*model, *free) and not _equal(value, stored[name])
    ]
    if differing:
        expected = f"the preset of {weights}, or no preset beside it"
        document.reject(("model", "preset"), expected, f"{model['preset']}, with {', '.join(differing[:3])}")


def _free(document: YamlDocument) -> tuple[str, ...]:
    """Return the dimensions in which this run may differ from its initial weights."""
    return (*FREE_BESIDE_WEIGHTS, *(SCORE_HEAD if document.get(("preference", "loss")) == "reward" else ()))


def _equal(given: Any, stored: Any) -> bool:
    """Return whether a given value agrees with the stored one. `none` stands for None. Of a section, only the given keys are compared."""
    if isinstance(given, dict) and isinstance(stored, dict):
        return all(_equal(value, stored.get(key)) for key, value in given.items())
    return (None if given == "none" else given) == stored


def _shown(value: Any) -> str:
    """Return a dimension as a run file would spell it, for messages."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _complete_model(document: YamlDocument) -> list[str]:
    """Add the values that follow from the model's family, then those that follow from other dimensions.

    Returns one sentence about them.
    """
    model = document.data["model"]
    family = str(model.get("family"))
    known: Mapping[str, Any] = {}
    if family in FAMILIES:
        width = model.get("hidden")
        known = {**FAMILIES[family].values, **(FAMILIES[family].by_width(width) if _is_count(width) else {})}
    values = [item for item in known.items() if item[0] not in model]
    of_family = ", ".join(_put_beside(document, "family", name, value) for name, value in values)
    derived = ", ".join(
        filter(None, (_complete_ffn(document), _complete_kv_heads(document), _complete_head_dim(document)))
    )
    parts = [part for part in (of_family and f"{of_family} as {family} has them", derived) if part]
    return [f"model: {'; '.join([family, *parts])}"] if parts else []


def _complete_ffn(document: YamlDocument) -> str | None:
    """Set `ffn_hidden` by the convention of `ffn_width`. Returns a text about it, None if it is given or cannot be computed."""
    model = document.data["model"]
    if model.get("ffn_hidden") is not None or not _is_count(model.get("hidden")):
        return None
    width, formula = ffn_width(model["hidden"], model.get("mlp"))
    return f"{_put_beside(document, 'hidden', 'ffn_hidden', width)} = {formula}"


def _complete_kv_heads(document: YamlDocument) -> str | None:
    """Set `kv_heads` to `heads`. Returns a text about it, None if it is given or cannot be computed."""
    heads = document.data["model"].get("heads")
    if document.data["model"].get("kv_heads") is not None or heads is None:
        return None
    text = _put_beside(document, "heads", "kv_heads", heads)
    if _is_count(heads):
        return f"{text} = heads"
    document.rejected.add(("model", "kv_heads"))
    return None


def _complete_head_dim(document: YamlDocument) -> str | None:
    """Set `head_dim` to `hidden` / `heads`, and reject a remainder.

    Returns a text about it, None if it is given or cannot be computed.
    """
    model = document.data["model"]
    heads = model.get("heads")
    hidden = model.get("hidden")
    if model.get("head_dim") is not None or heads is None or hidden is None:
        return None
    if _is_count(heads) and _is_count(hidden) and hidden % heads == 0:
        return f"{_put_beside(document, 'hidden', 'head_dim', hidden // heads)} = hidden / heads"
    if _is_count(heads) and _is_count(hidden):
        expected = f"a multiple of model.heads = {heads}, or model.head_dim beside it"
        document.reject(("model", "hidden"), expected, nearest=str(max(1, round(hidden / heads)) * heads))
    document.rejected.add(("model", "head_dim"))
    return None


def _put_beside(document: YamlDocument, existing_key: str, name: str, value: Any) -> str:
    """Set a key of the model, with the position of the key from which it is derived. Returns its name and value as text."""
    document.put(("model", name), value, document.value_position(("model", existing_key)))
    return f"{name} {format_value(value) if isinstance(value, bool) else value}"


def _limit_sequence(document: YamlDocument) -> None:
    """If `train.seq_len` is absent, set it to its default or to the longest sequence of the model, whichever is less."""
    longest = document.data["model"].get("max_seq_len")
    train = document.data["train"]
    default = next(f.default for f in dataclasses.fields(TrainSpec) if f.name == "seq_len")
    if isinstance(train, dict) and "seq_len" not in train and _is_count(longest) and longest < default:
        document.put(("train", "seq_len"), longest, document.value_position(("model", "max_seq_len")))


def complete_batch(document: YamlDocument) -> None:
    """Set the keys that follow from `train.global_batch_tokens`.

    These are `train.global_batch`, the number of sequences that the planner assumes for a step, and
    `data.document_mask`.
    """
    train = document.data.get("train")
    path: KeyPath = ("train", "global_batch_tokens")
    tokens = document.get(path)
    seq_len = document.get(("train", "seq_len")) or TrainSpec.seq_len
    if not isinstance(train, dict) or not _is_count(tokens) or not _is_count(seq_len):
        return
    batch = train.get("global_batch")
    file = document.value_position(("train", "global_batch")).file
    if batch not in (None, "none") and file != EMBEDDED:
        expected = "no train.global_batch beside it (none drops an inherited one): a step has so many tokens or so many sequences"
        document.reject(path, expected, f"{tokens} beside train.global_batch {batch}")
        return
    sizes = [document.get(("cluster", key)) for key in ("nodes", "gpus_per_node")]
    ranks = math.prod(size for size in sizes if _is_count(size))
    position = document.value_position(path)
    document.put(("train", "global_batch"), planned_sequences(tokens, seq_len, ranks), position)
    data = document.data.setdefault("data", {})
    if isinstance(data, dict) and "document_mask" not in data:
        document.put(("data", "document_mask"), True, position)


def _complete_epochs(document: YamlDocument) -> None:
    """If `train.epochs` is given, set `train.steps` to the placeholder `STEPS_OF_EPOCHS`. It is replaced once the data are opened."""
    path: KeyPath = ("train", "epochs")
    epochs = document.get(path)
    if epochs in (None, "none"):
        return
    steps = document.get(("train", "steps"))
    file = document.value_position(("train", "steps")).file
    if steps not in (None, "none") and file != EMBEDDED:
        expected = "no train.steps beside it (none drops an inherited one): a run has so many steps or so many epochs"
        document.reject(path, expected, f"{epochs} beside train.steps {steps}")
        return
    document.put(("train", "steps"), STEPS_OF_EPOCHS, document.value_position(path))


def _limit_warmup(document: YamlDocument) -> None:
    """If an override makes a quick start shorter than its warm-up, set the warm-up to a tenth of the steps."""
    path: KeyPath = ("train", "warmup_steps")
    steps = document.get(("train", "steps"))
    warmup = document.get(path)
    if document.value_position(path).file == EMBEDDED and _is_count(steps) and warmup is not None and warmup >= steps:
        document.put(path, steps // 10, document.value_position(path))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
