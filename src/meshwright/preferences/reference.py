"""Log-probabilities of answers under a reference model, stored with the corpus: one number for each answer.

The file reference-KEY in the directory of the shards has a line of JSON, and then a little-endian float64 for each document
of the directory. It is NaN if it has not been computed. KEY is a digest of everything on which the numbers depend: the
tokens of the shards, the weights and dimensions of the model, and the dtypes of its computation. So every run with the
same reference and corpus can use the file.
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
"""dtype of the numbers in the file."""


def weights_identity(run: RunSpec) -> str:
    """Return a digest of the reference's weights.

    It covers some rows of each weight (`checkpoint.models.adapters.base_digest`), and all initial adapters.
    """
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
    """Return the key of the log-probabilities of a corpus under a reference.

    `weights` is the identity of the reference's weights, `corpus` the digest of the corpus. `more` distinguishes numbers
    for other answers than the corpus has.
    """
    model = {name: value for name, value in to_plain(run.model).items() if name not in ("preset", "init", "adapter")}
    parts = [corpus, weights, model, plan.precision.compute, plan.precision.linear, more]
    return digest(json.dumps(parts, sort_keys=True).encode())[:16]


def reference_path(directory: Path, key: str) -> Path:
    """Return the path of the file with this key."""
    return directory / f"reference-{key}"


def read_reference(path: Path, documents: int) -> np.ndarray | None:
    """Return the log-probabilities `(documents,)` in a file, or None if there is no file. Raises Damaged if it is invalid."""
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
    """Write the file in one step."""
    content = values.astype(FLOAT).tobytes()
    write_durable(path, json.dumps(_record(content)).encode() + b"\n" + content)


def _record(values: bytes) -> dict[str, Any]:
    return {"documents": len(values) // FLOAT.itemsize, "digest": digest(values)}


def place_of(directory: Path, run_folder: Path) -> Path:
    """Return the directory itself, or the run's folder if the directory cannot be written to."""
    return directory if os.access(directory, os.W_OK) else run_folder
