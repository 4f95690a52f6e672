"""The answer of `meshwright plan --largest`: the largest model of a family that fits, and where its bytes are."""

from __future__ import annotations

from typing import Any

from meshwright.planner.candidate import host_budget, memory_budget
from meshwright.planner.largest import Largest, largest_models
from meshwright.spec.plan_keys import plain_keys
from meshwright.spec.run import RunSpec

FORMS = {
    ("none", "fp32"): "state on the devices",
    ("optimizer", "fp32"): "state in host memory, exact",
    ("optimizer", "bf16"): "bf16 moments, which round",
    ("optimizer", "int8"): "8-bit moments, which round",
}
"""Forms of the optimizer's state, by (`offload`, `moments`), as people see them."""


def largest_as_plain(run: RunSpec) -> dict[str, Any]:
    """Return the answer as JSON values. Raises the errors of `largest_models`."""
    return {
        "family": run.model.family,
        "device_bytes_usable": memory_budget(run),
        "host_bytes_usable": host_budget(run),
        "largest": [_as_plain(entry) for entry in largest_models(run)],
    }


def largest_as_text(run: RunSpec) -> list[str]:
    """Return the answer as lines of text. Raises the errors of `largest_models`."""
    usable = (memory_budget(run) or 0) / 1e9
    cluster = f"{run.cluster.ranks} x {run.cluster.gpu}"
    lines = [
        f"Largest {run.model.family} on {cluster}: {usable:.1f} GB of each device and {host_budget(run) / 1e9:.1f} GB of each host"
    ]
    return lines + [line for entry in largest_models(run) for line in _lines(entry)]


def _as_plain(entry: Largest) -> dict[str, Any]:
    """Return the largest model for one form of the optimizer's state, as JSON values."""
    plain: dict[str, Any] = {"offload": entry.offload, "moments": entry.moments, "parameters": entry.parameters}
    if entry.model is None or entry.plan is None:
        return {**plain, "model": None, "plan": None}
    model = {
        name: getattr(entry.model, name) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden")
    }
    return {
        **plain,
        "model": model,
        "plan": plain_keys(entry.plan),
        "host_bytes": entry.host_bytes,
        "bytes": _by_place(entry),
    }


def _by_place(entry: Largest) -> dict[str, dict[str, float]]:
    """Return the bytes of a device and of a host by their use, `{"device": {use: bytes}, "host": {use: bytes}}`.

    Uses below 50 MB are left out.
    """
    predicted = entry.plan.predicted if entry.plan is not None else None
    device = {} if predicted is None else predicted.memory_bytes
    return {
        memory: {use: size for use, size in sizes.items() if size >= 5e7}
        for memory, sizes in (("device", device), ("host", entry.host))
    }


def _lines(entry: Largest) -> list[str]:
    """Return the largest model for one form of the optimizer's state, in lines of text."""
    form = FORMS.get((entry.offload, entry.moments), f"offload {entry.offload}, moments {entry.moments}")
    if entry.model is None or entry.plan is None or entry.plan.predicted is None:
        return [f"{form}: no model fits"]
    model = entry.model
    predicted = entry.plan.predicted
    device, host = (
        ", ".join(f"{use} {size / 1e9:.1f}" for use, size in sizes.items()) for sizes in _by_place(entry).values()
    )
    seconds = f", {predicted.step_seconds:.2f} s a step" if predicted.step_seconds else ""
    words = f"model.layers={model.layers} model.hidden={model.hidden} model.heads={model.heads} model.ffn_hidden={model.ffn_hidden}"
    return [
        f"{form}: {entry.parameters / 1e9:.1f} B parameters{seconds}",
        f"  {words}",
        f"  device {predicted.memory_peak_bytes / 1e9:.1f} GB: {device or 'less'}",
        f"  host {entry.host_bytes / 1e9:.1f} GB{': ' if host else ''}{host}",
    ]
