"""OLMo 3 (OLMo Team 2025): OLMo 2 in which three of four layers have a window, and the others YaRN.

The presets have the dimensions of the released config files. Older folders have one base for all layers and `rope_scaling` for full layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes, whole_width
from meshwright.families.gemma3_text import GLOBAL, LOCAL, kinds_of_layers, layer_types, ropes_by_kind, write_kinds
from meshwright.families.llama import gated_decoder_config, gated_decoder_fields
from meshwright.families.olmo2 import OLMO2
from meshwright.spec.model import ModelSpec

_WINDOW, _BASE = 4096, 500_000.0
_BASES = {LOCAL: _BASE, GLOBAL: _BASE}


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("attention_bias", False)
    ropes = ropes_by_kind(config, {LOCAL: ("rope_theta", None), GLOBAL: ("rope_theta", "rope_scaling")}, _BASES)
    fields = gated_decoder_fields(config.without("rope_parameters", "rope_scaling", "rope_theta"))
    window = config.integer("sliding_window", default=_WINDOW)
    return {**fields, **kinds_of_layers(layer_types(config, fields["layers"], 4), window, ropes)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    kinds = write_kinds(spec, "an OLMo 3", _WINDOW, dict.fromkeys(_BASES, spec.rope_theta))
    return {**whole_width(gated_decoder_config(spec), spec), "attention_bias": False, **kinds}


FAMILY = replace(
    OLMO2, model_type="olmo3", architecture="Olmo3ForCausalLM", from_config=_from_config, to_config=_to_config
)


def _preset(size: dict[str, Any], kv_heads: int, learning_rate: float) -> Preset:
    yarn = {"factor": 8.0, "original_max_seq_len": 8192, "mscale_all_dim": 0.0, "attention_factor": 1.2079441541679836}
    ropes = {LOCAL: {"rope_theta": _BASE}, GLOBAL: {"rope_theta": _BASE, "yarn": yarn}}
    model = {
        **size,
        "kv_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 100278,
        "max_seq_len": 65536,
        "norm_eps": 1e-6,
        **kinds_of_layers([LOCAL, LOCAL, LOCAL, GLOBAL], _WINDOW, ropes),
    }
    return Preset(model=model, learning_rate=learning_rate, seq_len=8192)


PRESETS = {
    "olmo3-7b": _preset(sizes(32, 4096, 32, 11008), 32, 3e-4),
    "olmo3-32b": _preset(sizes(64, 5120, 40, 27648), 8, 6e-4),
}
