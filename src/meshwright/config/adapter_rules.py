"""Keys of adapters (`model.adapter`): names of targets become ours, and what goes beside adapters."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from meshwright.config.run_values import RunValues
from meshwright.config.schema import validate
from meshwright.config.yaml_positions import Document, KeyPath
from meshwright.families.adapters import resolved_targets
from meshwright.spec.adapter_limits import adapter_conflict
from meshwright.spec.blocks.adapter import AdapterSpec
from meshwright.spec.errors import BadInput, Mistake
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec

TARGETS: KeyPath = ("model", "adapter", "targets")


def complete_adapter(document: Document) -> None:
    """Replace the targets of adapters by our names of the model's linear layers; rejects one that matches none.

    Checkpoints name the base by `model.init`, so its path becomes absolute.
    """
    adapter, model = document.get(("model", "adapter")), document.get(("model",))
    if not isinstance(adapter, dict):
        return
    source, _, folder = str(model.get("init")).partition(":")
    if folder:
        model["init"] = f"{source}:{os.path.abspath(os.path.expanduser(folder))}"
    names = {field.name for field in dataclasses.fields(ModelSpec)} - {"adapter"}
    values, mistakes = validate(ModelSpec, {key: value for key, value in model.items() if key in names})
    targets = adapter.get("targets", list(AdapterSpec().targets))
    if mistakes or not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return  # these are reported elsewhere
    path = TARGETS if "targets" in adapter else TARGETS[:-1]
    try:
        resolved = resolved_targets(from_plain(ModelSpec, values), targets)
    except BadInput as error:
        what, _, expected = str(error).partition(": expected ")
        expected, _, near = expected.partition("; nearest: ")
        document.reject(path, expected, what, near or None)
    else:
        document.put(TARGETS, list(resolved), document.value_position(path))


def adapters(run: RunValues) -> Iterator[Mistake]:
    """Keys of the plan that do not go with the run's adapters."""
    layers = run("plan.layers") or ()
    formats = [run("plan.linear"), *(layer.get("linear") for layer in layers if isinstance(layer, dict))]
    wrong = adapter_conflict(
        _kind(run),
        formats=filter(None, formats),
        tensor=run("plan.tensor") or 1,
        mlp_tile=run("plan.mlp_tile") or 0,
        expert_policy=run("plan.expert_policy") or "none",
        expert_owners=run("plan.expert_owners") or "even",
    )
    if wrong:
        yield run.mistake(f"plan.{wrong[0]}", wrong[1])


def _kind(run: RunValues) -> str | None:
    """The kind of the run's adapters; None without adapters."""
    return None if run("model.adapter") is None else run("model.adapter.kind") or AdapterSpec().kind
