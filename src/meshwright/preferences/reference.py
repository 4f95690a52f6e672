"""Log-probabilities of answers under a reference, kept beside their corpus: one number for each answer.

reference-KEY in the directory of the shards: a line of JSON, then a float64 for each document of the directory, little endian; NaN where
it has not been computed. KEY is a digest of what the numbers follow from: the tokens of the shards, the weights and dimensions of the
model, and the dtypes of its compute. So any run with the same reference and corpus reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.checkpoint.models.adapters import adapter_values, base_digest
from meshwright.checkpoint.models.initial import base_weights
from meshwright.checkpoint.models.stored_model import open_adapter
from meshwright.durable.writes import digest, write_durable
from meshwright.spec.errors import Damaged
from meshwright.spec.fields import to_plain
from meshwright.spec.plan import Plan
from meshwright.spec.preference import START
from meshwright.spec.run import RunSpec

FLOAT = np.dtype("<f8")


def weights_identity(run: RunSpec) -> str:
    """A digest of the reference's weights: of some rows of each weight (`checkpoint.models.adapters.base_digest`), and of all adapters."""
    assert run.preference is not None
    init = run.model.init if run.preference.reference == START else run.preference.reference
    with base_weights(run.model, init, run.seed) as base:
        found = base_digest(run.model, base.read_rows)
    adapter = run.model.adapter
    if run.preference.reference != START or adapter is None or adapter.init is None:
        return found
    whole = hashlib.blake2b(found.encode(), digest_size=16)
    for name, tensor in adapter_values(
        run.model, open_adapter(Path(adapter.init), run.model).deltas, adapter.init
    ).items():
        whole.update(name.encode() + tensor.float().contiguous().numpy().tobytes())
    return whole.hexdigest()


def reference_key(run: RunSpec, plan: Plan, weights: str, corpus: str, more: str = "") -> str:
    """The key of the log-probabilities of a corpus with this digest, under weights with this identity; `more` is for other answers."""
    model = {name: value for name, value in to_plain(run.model).items() if name not in ("preset", "init", "adapter")}
    parts = [corpus, weights, model, plan.precision.compute, plan.precision.linear, more]
    return digest(json.dumps(parts, sort_keys=True).encode())[:16]


def reference_path(directory: Path, key: str) -> Path:
    """The file of these log-probabilities."""
    return directory / f"reference-{key}"


def read_reference(path: Path, documents: int) -> np.ndarray | None:
    """The log-probabilities `(documents,)` in a file; None if there is none. Raises Damaged for another content than was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    head, _, values = content.partition(b"\n")
    try:
        expected = json.loads(head)
    except ValueError:
        expected = None
    if not isinstance(expected, dict) or expected != _record(values) or len(values) != documents * FLOAT.itemsize:
        raise Damaged(
            f"{path}: not the {documents} log-probabilities that were written; remove it, and the run computes them again"
        )
    return np.frombuffer(values, FLOAT).astype(np.float64)


def write_reference(path: Path, values: np.ndarray) -> None:
    """Write the file whole or not at all."""
    content = values.astype(FLOAT).tobytes()
    write_durable(path, json.dumps(_record(content)).encode() + b"\n" + content)


def _record(values: bytes) -> dict[str, Any]:
    return {"documents": len(values) // FLOAT.itemsize, "digest": digest(values)}


def place_of(directory: Path, run_folder: Path) -> Path:
    """The directory itself, or the run's folder where it cannot be written."""
    return directory if os.access(directory, os.W_OK) else run_folder
