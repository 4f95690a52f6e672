"""Plain state as JSON, and texts: the parts of a checkpoint that are not tensors. Torch-free."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files import parse_json, plain_name
from meshwright.checkpoint.manifest import COMMITTED, CONTENTS, MANIFEST, STATE
from meshwright.spec.errors import BadInput, Damaged

_RESERVED = {MANIFEST, COMMITTED, CONTENTS, STATE}


def encode_plain(state: dict[str, Any], texts: dict[str, str]) -> dict[str, bytes]:
    """The files for `state` and `texts` by name; raises BadInput for what cannot be kept as it is."""
    return {STATE: encode_state(state), **encode_texts(texts)}


def encode_state(state: dict[str, Any]) -> bytes:
    """The bytes of `state.json`.

    Raises BadInput naming the first value that JSON would not give back as it was.
    """
    _check(state, "state")
    return (json.dumps(state, indent=1, sort_keys=True) + "\n").encode()


def decode_state(data: bytes, path: Path) -> dict[str, Any]:
    """What `encode_state` was given; raises Damaged when the bytes are something else."""
    state = parse_json(data, path)
    if not isinstance(state, dict):
        raise Damaged(f"{path} is not a mapping")
    return state


def encode_texts(texts: dict[str, str]) -> dict[str, bytes]:
    """Files of the given names; raises BadInput for a name that is not a plain one or is the checkpoint's own."""
    for name in texts:
        if plain_name(name) is None or name in _RESERVED or name.endswith(".safetensors"):
            raise BadInput(
                f"a text saved with a checkpoint is called {name!r}; expected a plain file name such as config.yaml"
            )
    return {name: text.encode("utf-8") for name, text in texts.items()}


def _check(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise BadInput(f"{where}: key {key!r} is not text, and would be after a reload")
            _check(each, f"{where}.{key}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _check(each, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"{where} is {value}, which JSON cannot hold; expected a finite number or null")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise BadInput(
            f"{where} is a {type(value).__name__}; plain state holds numbers, text, booleans, null, lists and mappings"
        )
