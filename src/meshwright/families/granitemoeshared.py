"""Granite MoE with a shared expert (IBM 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig
from meshwright.families.granitemoe import GRANITEMOE
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    width = config.get("shared_intermediate_size", 0)
    shared = 0 if width == 0 else config.integer("shared_intermediate_size")
    return {**GRANITEMOE.from_config(config), "shared_expert_hidden": shared}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**GRANITEMOE.to_config(spec), "shared_intermediate_size": spec.shared_expert_hidden}


FAMILY = replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    score_class=None,
    modules={
        **GRANITEMOE.modules,
        "moe.shared.gate_up": ("shared_mlp.input_linear",),
        "moe.shared.down": ("shared_mlp.output_linear",),
    },
    from_config=_from_config,
    to_config=_to_config,
)
