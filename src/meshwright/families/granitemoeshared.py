"""Granite MoE with a shared expert (IBM 2025)."""

from __future__ import annotations

from dataclasses import replace

from meshwright.families.format import ConfigKeys, Key
from meshwright.families.granitemoe import GRANITEMOE

_KEYS = ConfigKeys({"shared_expert_hidden": Key("shared_intermediate_size", 0, least=0)})
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
    from_config=lambda config: {**GRANITEMOE.from_config(config), **_KEYS.read(config)},
    to_config=lambda spec: {**GRANITEMOE.to_config(spec), **_KEYS.write(spec)},
)
RELEASES = ("moe-7b-1b-active-shared-experts",)
