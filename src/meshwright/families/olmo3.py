"""OLMo 3 (OLMo Team 2025): OLMo 2 in which three of every four layers have a sliding window, and the fourth uses YaRN.

Older folders have one rotary base for all layers, and `rope_scaling` for the layers without a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import decoder, layers
from meshwright.families.keys.layers import FULL, SLIDING
from meshwright.families.olmo2 import OLMO2
from meshwright.spec.model import ModelSpec

_WINDOW = 4096
_BASE = 500_000.0
_OUTSIDE = {SLIDING: ("rope_theta", None), FULL: ("rope_theta", "rope_scaling")}


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("attention_bias", False)
    ropes = layers.ropes_by_kind(config, _OUTSIDE, dict.fromkeys(_OUTSIDE, _BASE))
    fields = decoder.read(config.without("rope_parameters", "rope_scaling", "rope_theta"))
    window = config.integer("sliding_window", default=_WINDOW)
    types = layers.read_types(config, layers.periodic(fields["layers"], 4))
    return {**fields, **layers.rotated(types, window, ropes)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    kinds = layers.write_rotated(spec, "an OLMo 3", _WINDOW, dict.fromkeys(_OUTSIDE, spec.rope_theta))
    return {**decoder.shortened(decoder.write(spec), spec), "attention_bias": False, **kinds}


FAMILY = replace(
    OLMO2, model_type="olmo3", architecture="Olmo3ForCausalLM", from_config=_from_config, to_config=_to_config
)
_YARN = {"factor": 8.0, "original_max_seq_len": 8192, "mscale_all_dim": 0.0, "attention_factor": 1.2079441541679836}
_ROPES = {SLIDING: {"rope_theta": _BASE}, FULL: {"rope_theta": _BASE, "yarn": _YARN}}
PRESETS = presets(
    {"olmo3-7b": size(32, 4096, 32, 32, 11008, 3e-4), "olmo3-32b": size(64, 5120, 40, 8, 27648, 6e-4)},
    seq_len=8192,
    head_dim=128,
    vocab_size=100278,
    max_seq_len=65536,
    norm_eps=1e-6,
    **layers.rotated(layers.periodic(4, 4), _WINDOW, _ROPES),
)
RELEASES = ("Olmo-3-7B-Instruct", "Olmo-3-32B-Think")
