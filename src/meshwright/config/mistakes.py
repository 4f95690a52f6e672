"""Turns errors of the schema into Mistakes: position, what was expected, and the nearest valid value."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import Any

from meshwright.config.family_dimensions import required_dimensions
from meshwright.config.presets import PRESET_EXPECTED
from meshwright.config.schema import (
    accepts,
    all_keys,
    annotation_at,
    expected_text,
    literal_options,
    section_at,
    validate,
)
from meshwright.config.value_sources import COMMAND_LINE
from meshwright.config.yaml_positions import KeyPath, Position, YamlDocument, dotted, format_value
from meshwright.spec.chips import CHIPS
from meshwright.spec.errors import MOST_LISTED, Mistake, Refusal, nearest, shorten
from meshwright.spec.fields import LARGEST_COUNT, hints_of
from meshwright.spec.foreign_words import SERVING, THIS_MACHINE, TRAINING, Meaning, normalized
from meshwright.spec.run import ModelSection
from meshwright.spec.secrets import is_secret_name
from meshwright.spec.serve import ServeSpec

_NO_DROPOUT = "no such key; there is no dropout: every layout and every resumed run must compute the same"
"""Answer to keys about dropout."""
_EXPERTS = (
    "no such key; an MoE model is experts, experts_per_token, expert_hidden, shared_expert_hidden, first_dense_layers"
)
"""Answer to expert keys of other programs."""
_NOT_YET = "no such key; this release plans replicate, shard, pipeline, tensor, context_ring, context_ulysses, hybrid and expert"
"""Answer to axes of parallelism that other programs have."""
_WHOLE_DISTRIBUTION = (
    "no such key; answers are drawn from all tokens, as the trainer's probabilities are of all of them: delete the line"
)
"""Answer to sampling options in the section `rl`."""
_RESTRICTED = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "logit_bias",
)
"""Options of a server that exclude tokens or change the probabilities with which tokens are drawn."""
_OTHER_PARALLELISM = ("sequence", "context", "experts", "sequence_parallel")
"""Names of axes of parallelism in other programs."""
KEYS_OF_OTHER_FILES = {
    "serve": "`meshwright plan` and `bench-serve` read a file with it",
    "instances": "`serve --plan` and `bench-serve --plan` read a deployment",
}
"""Top-level keys of files that are not run files, and which commands read these files."""
_SHORTHANDS: dict[KeyPath, str] = {
    ("model",): "a preset's name or ",
    ("cluster",): "auto, a cluster file or ",
    ("data", "mix"): "a data directory or ",
    ("observe", "wandb"): "a project's name or ",
    ("serve", "quantisation"): "fp8, int8 or ",
}
"""Words that a section may be instead, by the path of the section. Each text begins a sentence about what was expected."""


def schema_mistakes(cls: type, document: YamlDocument) -> tuple[dict[str, Any], list[Mistake], set[KeyPath]]:
    """Return the validated keys of `document`, its mistakes, and the paths that have no usable value."""
    values, errors = validate(cls, document.data)
    errors = [error for error in errors if not _is_rejected(document, error.path)]
    unknown = [error for error in errors if error.problem == "unknown"]
    # To compute a suggestion takes time, so only the mistakes that will be listed get one.
    meant = {error.path: meant_key(cls, error.path, document) for error in unknown[:MOST_LISTED]}
    mistakes = [_unknown_key_mistake(cls, document, error.path, meant.get(error.path)) for error in unknown]
    missing = [error.path for error in errors if error.problem == "missing"]
    missing += [path for path in _missing_dimensions(cls, document) if path not in missing]
    if not document.partial:
        mistakes += _missing_key_mistakes(
            cls, document, [path for path in missing if not _starts_with_any(path, meant.values())]
        )
    mistakes += [_value_mistake(cls, document, error.path) for error in errors if error.problem == "value"]
    return values, mistakes, {error.path for error in errors} | set(missing) | document.rejected


def _missing_dimensions(cls: type, document: YamlDocument) -> list[KeyPath]:
    """Return the paths of required model dimensions that are neither given nor derived."""
    model = document.data.get("model") if _has_model(cls) else None
    if not isinstance(model, dict):
        return []
    paths: list[KeyPath] = [("model", name) for name in required_dimensions(model) if model.get(name) is None]
    return [path for path in paths if not _is_rejected(document, path)]


def _shorthands(cls: type, path: KeyPath) -> str:
    """Return the words that the section at `path` may be instead, as the beginning of a sentence. Empty if there are none."""
    if path == ("quantisation",):  # The section `quantisation` of a deployment.
        path = ("serve", *path)
    elif not _has_model(cls):
        return ""
    return _SHORTHANDS.get(path, "")


def _has_model(cls: type) -> bool:
    """Return whether a file of the class `cls` has the section `model` of a run file."""
    return hints_of(cls).get("model") is ModelSection


def _foreign_word(cls: type, word: Any) -> Meaning:
    """Return what a key of another program means here, in a run file or in the settings of `serve`."""
    serving = SERVING if cls is ServeSpec else {}
    table = TRAINING if _has_model(cls) else serving
    return table.get(normalized(str(word)), Meaning())


def meant_key(cls: type, path: KeyPath, document: YamlDocument) -> KeyPath | None:
    """Return the path of the key that was probably meant by the unknown key at `path`. None if there is no guess.

    The candidates, in this order: the same name in the section; the same name in another section; a name of another
    program; a similar name in the section; a similar name anywhere.
    """
    parent = path[:-1]
    word = normalized(str(path[-1]))
    section = section_at(cls, parent, document.get(parent))
    siblings = list(hints_of(section)) if section else []
    all_paths = _key_of_name(cls)
    if word in siblings:
        return (*parent, word)
    if word in all_paths:
        return all_paths[word]
    foreign = _foreign_word(cls, word)
    if foreign.key is not None:
        return tuple(foreign.key.split("."))
    beginnings = [name for name in siblings if name.startswith(f"{word}_")]
    close = get_close_matches(word, siblings, n=3, cutoff=0.6) or (beginnings if len(beginnings) == 1 else [])
    if close:
        # A misspelled key in a file usually stands for a key that this file lacks, even if a file that it extends has
        # the key. An override may mean any key.
        file = document.key_position(path).file
        lacking = [name for name in close if not _is_written(document, (*parent, name), file)]
        likely = close if file == COMMAND_LINE else lacking or close
        return (*parent, likely[0])
    near_name = nearest(word, all_paths, cutoff=0.8)
    return all_paths[near_name] if near_name else None


def _is_written(document: YamlDocument, key: KeyPath, file: str) -> bool:
    """Return whether `file` itself contains the key.

    Keys that come from a preset do not count. Such a key and its value both have the position of the preset's name.
    """
    if not document.has(key):
        return False
    position = document.key_position(key)
    return position.file == file and position != document.value_position(key)


@cache
def _key_of_name(cls: type) -> dict[str, KeyPath]:
    """Return the paths of all keys by their last name. If several paths end with the same name, the first one counts."""
    return {str(key[-1]): key for key in reversed(list(all_keys(cls)))}


def _unknown_key_mistake(cls: type, document: YamlDocument, path: KeyPath, meant: KeyPath | None) -> Mistake:
    """Return the mistake of an unknown key. `meant` is the key that was probably meant.

    Keys that do not exist for a known reason, or that another program has, get a sentence about that instead.
    """
    parent = path[:-1]
    position = document.key_position(path)
    got = f"'{shorten(str(path[-1]))}'"
    expected = f"a key of {dotted(parent)}" if parent else "a top-level key"
    refused = _refusal(path if _has_model(cls) else ("plan", *path))
    foreign = _foreign_word(cls, path[-1])
    if refused or (foreign.advice and (meant is None or dotted(meant) == foreign.key)):
        sentence = refused or f"no such key; {foreign.advice}"
        near = None if refused else foreign.key
        return Refusal(position.file, position.line, position.column, dotted(path), sentence, sentence, near)
    if meant is None or meant == path:  # If they are equal, `path` is a key of another optimizer.
        section = section_at(cls, parent, document.get(parent))
        return _mistake(position, path, f"{expected} ({', '.join(hints_of(section) if section else ())})", got)
    if meant[:-1] == parent:
        return _mistake(position, path, expected, got, str(meant[-1]))
    if str(path[-1]) == meant[-1] or foreign.key == dotted(meant):
        expected += f"; its path is {dotted(meant)}"
    here = meant == ("cluster", "gpu") and str(document.get(path)).lower() in THIS_MACHINE
    return _mistake(position, path, expected, got, "cluster=auto" if here else dotted(meant))


def _refusal(path: KeyPath) -> str | None:
    """Return why a key that other trainers have does not exist here. None if there is no special reason."""
    section = path[0]
    name = str(path[-1])
    if len(path) == 1 and name in KEYS_OF_OTHER_FILES:
        return f"no key of a run file; {KEYS_OF_OTHER_FILES[name]}"
    if name.endswith(("dropout", "dropout_p", "dropout_prob")):
        return _NO_DROPOUT
    if section == "model" and (name.startswith(("moe", "expert")) or name == "num_experts"):
        return _EXPERTS
    if section == "rl" and name in _RESTRICTED:
        return _WHOLE_DISTRIBUTION
    if path in (("rl", "beta"), ("rl", "kl", "beta")):
        return "no such key; the weight of the divergence from the first weights is rl.kl.weight"
    return _NOT_YET if section == "plan" and name in _OTHER_PARALLELISM else None


def _missing_key_mistakes(cls: type, document: YamlDocument, paths: list[KeyPath]) -> list[Mistake]:
    """Return the mistakes of missing keys. All missing dimensions of the model together are one mistake."""
    model_keys = [str(path[1]) for path in paths if path[0] == "model" and len(path) == 2] if _has_model(cls) else []
    mistakes = [
        _mistake(document.key_position(path[:-1]), path, expected_text(annotation_at(cls, path)), "nothing")
        for path in paths
        if not (model_keys and path[0] == "model")
    ]
    required = required_dimensions(document.data.get("model") or {}) if model_keys else ()
    needed = [name for name in required if name in model_keys]
    if needed:
        expected = f"{PRESET_EXPECTED}, weights (init: hf:FOLDER), or all of {', '.join(required)}"
        got = "none of them" if len(needed) == len(required) else f"no {', '.join(needed)}"
        mistakes.append(_mistake(document.key_position(("model",)), ("model",), expected, got))
    return mistakes


def _value_mistake(cls: type, document: YamlDocument, path: KeyPath) -> Mistake:
    """Return the mistake of an invalid value. The value of a secret is not shown."""
    annotation = annotation_at(cls, path)
    value = document.get(path)
    expected = _shorthands(cls, path) + expected_text(annotation)
    if isinstance(value, int) and value > LARGEST_COUNT and accepts(annotation, int) and "<" not in expected:
        expected += f" of at most {LARGEST_COUNT:,}"
    secret = isinstance(path[-1], str) and is_secret_name(path[-1])
    shown = "a value that is not shown" if secret else format_value(value)
    near = None if secret else _near_value(annotation, value)
    if path == ("cluster", "gpu") and isinstance(value, int):
        near = nearest(str(value), CHIPS) or near
    return _mistake(document.value_position(path), path, expected, shown, near)


def _near_value(annotation: Any, value: Any) -> str | None:
    """Return the valid spelling of a value whose only fault is its type, for example 8 for "8". None if there is none."""
    options = literal_options(annotation)
    if isinstance(value, str) and accepts(annotation, bool):
        return {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}.get(
            value.lower(), nearest(value.lower(), ("true", "false"))
        )
    if options:
        return nearest(str(value).lower(), options)
    if isinstance(value, str) and (accepts(annotation, int) or accepts(annotation, float)):
        digits = value.replace("_", "").replace(",", "").strip()
        return digits if digits.isdigit() else None
    if isinstance(value, float) and accepts(annotation, int) and value.is_integer():
        return str(int(value))
    if isinstance(value, (int, float)) and accepts(annotation, str):
        return f'"{str(value).lower()}"'
    return None


def _is_rejected(document: YamlDocument, path: KeyPath) -> bool:
    return _starts_with_any(path, document.rejected)


def _starts_with_any(path: KeyPath, others: Iterable[KeyPath | None]) -> bool:
    return any(other is not None and path[: len(other)] == other for other in others)


def _mistake(position: Position, path: KeyPath, expected: str, got: str, near: str | None = None) -> Mistake:
    return Mistake(position.file, position.line, position.column, dotted(path), expected, got, near)
