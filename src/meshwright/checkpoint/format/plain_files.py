"""Encodes the parts of a checkpoint that are not tensors: `state.json` (step, samples, tokens) and text files.

This module does not import torch.
"""

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
    """Return the bytes of the files for `state` and `texts`, by file name. Raises BadInput for values that JSON changes."""
    return {STATE: encode_state(state), **encode_texts(texts)}


def encode_state(state: dict[str, Any]) -> bytes:
    """Return the bytes of `state.json`.

    Raises BadInput, naming the first value that would not be the same after a reload from JSON.
    """
    _check(state, "state")
    return (json.dumps(state, indent=1, sort_keys=True) + "\n").encode()


def decode_state(data: bytes, path: Path) -> dict[str, Any]:
    """Return the state in `data`, the inverse of `encode_state`. Raises Damaged, naming `path`, if it is no JSON object."""
    state = parse_json(data, path, own=True)
    if not isinstance(state, dict):
        raise Damaged(f"{path} is not a mapping")
    return state


def encode_texts(texts: dict[str, str]) -> dict[str, bytes]:
    """Return the bytes of text files by name.

    Raises BadInput for a name that is a path, the name of a tensor file, or reserved.
    """
    for name in texts:
        if plain_name(name) is None or name in _RESERVED or name.endswith(".safetensors"):
            raise BadInput(
                f"a text saved with a checkpoint is called {name!r}; expected a plain file name such as config.yaml"
            )
    return {name: text.encode("utf-8") for name, text in texts.items()}


def _check(value: Any, where: str) -> None:
    """Raise BadInput for the first value that would not be the same after a reload from JSON. `where` is the value's path."""
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
