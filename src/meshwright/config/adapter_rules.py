"""Completes the keys of adapters (`model.adapter`): target names become names of this project, and paths become absolute."""

from __future__ import annotations

import dataclasses
import os

from meshwright.config.schema import validate
from meshwright.config.yaml_positions import KeyPath, YamlDocument
from meshwright.families.adapters import resolved_targets
from meshwright.spec.blocks.adapter import AdapterSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec

TARGETS: KeyPath = ("model", "adapter", "targets")
"""Path of the key for the linear layers that get adapters."""


def complete_adapter(document: YamlDocument) -> None:
    """Replace the targets of adapters by this project's names of linear layers, and reject a target that matches no layer.

    The paths in `model.init` and `model.adapter.init` become absolute, because checkpoints refer to the base model by
    `model.init`.
    """
    adapter = document.get(("model", "adapter"))
    model = document.get(("model",))
    if not isinstance(adapter, dict):
        return
    source, _, folder = str(model.get("init")).partition(":")
    if folder:
        model["init"] = f"{source}:{os.path.abspath(os.path.expanduser(folder))}"
    if isinstance(start := adapter.get("init"), str):
        adapter["init"] = os.path.abspath(os.path.expanduser(start))
    names = {field.name for field in dataclasses.fields(ModelSpec)} - {"adapter"}
    values, mistakes = validate(ModelSpec, {key: value for key, value in model.items() if key in names})
    targets = adapter.get("targets", list(AdapterSpec().targets))
    if mistakes or not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return  # Other checks report these mistakes.
    path = TARGETS if "targets" in adapter else TARGETS[:-1]
    try:
        resolved = resolved_targets(from_plain(ModelSpec, values), targets)
    except BadInput as error:
        what, _, expected = str(error).partition(": expected ")
        expected, _, near = expected.partition("; nearest: ")
        document.reject(path, expected, what, near or None)
    else:
        document.put(TARGETS, list(resolved), document.value_position(path))
