"""Encodes the parts of a checkpoint that are not tensors: `state.json` (step, samples, tokens) and text files. Torch-free."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from meshwright.checkpoint.format.files import plain_name
from meshwright.checkpoint.format.manifest import COMMITTED, CONTENTS, MANIFEST, STATE
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.folder_files import parse_json

_RESERVED = {MANIFEST, COMMITTED, CONTENTS, STATE}


def encode_plain(state: dict[str, Any], texts: dict[str, str]) -> dict[str, bytes]:
    """The bytes of the files for `state` and `texts`, by file name; raises BadInput for values that JSON would change."""
    return {STATE: encode_state(state), **encode_texts(texts)}


def encode_state(state: dict[str, Any]) -> bytes:
    """The bytes of `state.json`.

    Raises BadInput naming the first value that JSON would not give back as it was.
    """
    _check(state, "state")
    return (json.dumps(state, indent=1, sort_keys=True) + "\n").encode()


def decode_state(data: bytes, path: Path) -> dict[str, Any]:
    """The inverse of `encode_state`; raises Damaged when `data` is not a JSON object. `path` is for the message."""
    state = parse_json(data, path, own=True)
    if not isinstance(state, dict):
        raise Damaged(f"{path} is not a mapping")
    return state


def encode_texts(texts: dict[str, str]) -> dict[str, bytes]:
    """The bytes of text files by name; raises BadInput for a path, a name of a tensor file and a reserved name."""
    for name in texts:
        if plain_name(name) is None or name in _RESERVED or name.endswith(".safetensors"):
            raise BadInput(
                f"a text saved with a checkpoint is called {name!r}; expected a plain file name such as config.yaml"
            )
    return {name: text.encode("utf-8") for name, text in texts.items()}


def _check(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadInput(f"{where}: key {key!r} is not text, and would be after a reload")
            _check(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"{where} is {value}, which JSON cannot hold; expected a finite number or null")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise BadInput(
            f"{where} is a {type(value).__name__}; plain state holds numbers, text, booleans, null, lists and mappings"
        )
