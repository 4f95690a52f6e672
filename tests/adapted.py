"""Models with adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.adapters import resolved_targets
from meshwright.spec.blocks.adapter import AdapterSpec
from meshwright.spec.model import ModelSpec


def adapter_of(spec: ModelSpec, **fields: Any) -> ModelSpec:
    """The model with adapters of these AdapterSpec fields; targets may be names of its folder, as in a run file."""
    adapter = AdapterSpec(**fields)
    return replace(spec, adapter=replace(adapter, targets=resolved_targets(spec, adapter.targets)))
