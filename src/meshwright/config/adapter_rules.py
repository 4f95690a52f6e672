"""Keys of adapters (`model.adapter`): names of targets become ours, and what goes beside adapters."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from meshwright.config.run_values import RunValues
from meshwright.config.schema import validate
from meshwright.config.yaml_positions import Document, KeyPath, format_value
from meshwright.families.adapters import resolved_targets
from meshwright.spec.adapter_limits import adapter_conflict
from meshwright.spec.blocks.adapter import AdapterSpec
from meshwright.spec.errors import BadInput, Mistake
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan

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
    """Pins of a run that do not go with its adapters."""
    layers = run("plan.layers") or ()
    formats = [run("plan.linear"), *(layer.get("linear") for layer in layers if isinstance(layer, dict))]
    sizes: dict[str, Any] = {"tensor": run("plan.tensor") or 1, "mlp_tile": run("plan.mlp_tile") or 0}
    sizes |= {key: run(f"plan.{key}") or usual for key, usual in (("expert_policy", "none"), ("expert_owners", "even"))}
    if wrong := adapter_conflict(_kind(run), formats=filter(None, formats), **sizes):
        yield run.mistake(f"plan.{wrong[0]}", wrong[1])


def plan_file_adapters(plan: Document, run: RunValues) -> Iterator[Mistake]:
    """Keys of a plan file that do not go with its run's adapters."""
    values = from_plain(Plan, validate(Plan, plan.data)[0])
    formats = [layer.linear or values.precision.linear for layer in values.layers]
    sizes: dict[str, Any] = {"tensor": values.axis_size("tensor"), "mlp_tile": values.mlp_tile}
    if values.experts is not None:
        sizes |= {"expert_policy": values.experts.policy, "expert_owners": values.experts.owners}
    if wrong := adapter_conflict(_kind(run), formats=formats, **sizes):
        at_axis = [axis.axis for axis in values.mesh].index("tensor") if wrong[0] == "tensor" else 0
        paths: dict[str, KeyPath] = {
            "tensor": ("mesh", at_axis, "size"),
            "linear": ("precision", "linear"),
            "expert_policy": ("experts", "policy"),
            "expert_owners": ("experts", "owners"),
        }
        path = paths.get(wrong[0], (wrong[0],))
        yield plan.mistake(path, wrong[1], format_value(plan.get(path) if plan.has(path) else None))


def _kind(run: RunValues) -> str | None:
    """The kind of the run's adapters; None without adapters."""
    return None if run("model.adapter") is None else run("model.adapter.kind") or AdapterSpec().kind
