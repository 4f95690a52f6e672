"""The rule about the optimizer's state in host memory: AdamW alone updates it there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.config.run_values import RunValues
from meshwright.config.yaml_positions import Document, KeyPath, format_value
from meshwright.spec.errors import Mistake


def offloaded_state(run: RunValues) -> Iterator[Mistake]:
    """Pins that move the state of an optimizer other than AdamW to host memory."""
    expected, offload = _expected(run), run("plan.offload")
    if expected and offload in ("optimizer", "both"):
        yield run.mistake("plan.offload", expected, "none")
    yield from plan_file_offload(run.document, run, ("plan", "layers"))


def plan_file_offload(document: Document, run: RunValues, path: KeyPath = ("layers",)) -> Iterator[Mistake]:
    """Layers at `path` that move the state of an optimizer other than AdamW to host memory."""
    expected, entries = _expected(run), document.get(path) if document.has(path) else None
    for index, entry in enumerate(entries if expected and isinstance(entries, list) else []):
        offload: Any = entry.get("offload") if isinstance(entry, dict) else None
        if offload in ("optimizer", "both"):
            yield document.mistake((*path, index, "offload"), expected, format_value(offload), "none")


def _expected(run: RunValues) -> str:
    name = run("train.optimizer.name")
    if name in (None, "adamw"):
        return ""
    return f"none or activations, as train.optimizer is {name}: only the state of adamw is updated in host memory"
