"""Reads, checks and writes the JSON file of a machine profile. It is torch-free, so any machine can plan with a profile."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.config.schema import annotation_at, expected_text, section_of, validate
from meshwright.config.yaml_positions import KeyPath, dotted, format_value
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import from_plain, hints_of, to_plain
from meshwright.spec.profile import MachineProfile


def load_profile(path: Path | str) -> MachineProfile:
    """Load the profile in the file at `path`. Raises BadInput that names the file, the key and what was expected."""
    try:
        stamp = os.stat(path).st_mtime_ns
    except OSError as error:
        raise BadInput(
            f"{path}: expected a profile that `meshwright profile --out FILE` wrote: {error.strerror}"
        ) from error
    return _loaded(str(path), stamp)


def to_json(profile: MachineProfile) -> str:
    """Return the content of a profile's file. Each measurement is one line."""
    lines = []
    for key, value in to_plain(profile).items():
        if isinstance(value, list) and value:
            entries = ",\n".join(f"  {json.dumps(_short(entry))}" for entry in value)
            lines.append(f" {json.dumps(key)}: [\n{entries}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(_short(value))}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _short(value: Any) -> Any:
    """Round numbers to six digits. Measurements are less precise than that."""
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


@lru_cache(maxsize=8)
def _loaded(path: str, stamp: int) -> MachineProfile:
    """Load a profile. The result is cached, because a search loads the same profile thousands of times.

    `stamp` is the modification time of the file in ns. It is only a key of the cache, so a changed file is read again.
    """
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: expected the JSON that `meshwright profile --out FILE` wrote, got {error}") from error
    if not isinstance(data, dict):
        raise BadInput(
            f"{path}: expected a JSON object, as `meshwright profile --out FILE` writes it, got {type(data).__name__}"
        )
    profile, mistakes = validate(MachineProfile, data)
    if mistakes:
        raise BadInput("\n".join(f"{path}: {_message(wrong.path, wrong.problem, data)}" for wrong in mistakes))
    return from_plain(MachineProfile, profile)


def _message(path: KeyPath, problem: str, data: dict[str, Any]) -> str:
    """Return the message for one mistake at `path`. `problem` is "unknown", "missing" or "value"."""
    if problem == "unknown":
        section = section_of(annotation_at(MachineProfile, path[:-1])) if path[:-1] else MachineProfile
        keys = ", ".join(hints_of(section) if section else ())
        return f"{dotted(path)}: expected a key of a profile ({keys}), got '{path[-1]}'"
    expected = expected_text(annotation_at(MachineProfile, path))
    return f"{dotted(path)}: expected {expected}, got {'nothing' if problem == 'missing' else format_value(_at(data, path))}"


def _at(data: Any, path: KeyPath) -> Any:
    for step in path:
        data = data[step]
    return data
