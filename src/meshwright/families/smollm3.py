"""SmolLM3 (Bakouch et al. 2025): Llama in which every fourth layer does not rotate queries and keys.

The preset is the base model. Its learning rate and sequence length are those of the published recipe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import decoder, layers
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_INTERVAL = 4


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = LLAMA.from_config(config)
    rotated = layers.read_rotated_layers(config, fields["layers"], _INTERVAL)
    window = config.integer("sliding_window") if config.flag("use_sliding_window", False) else None
    config.get("sliding_window")
    types = layers.read_types(config, [layers.SLIDING if window and not turns else layers.FULL for turns in rotated])
    local = {"sliding_window": window}
    bare = {"positions": "none"}
    kinds = {"rotary": {}, "bare": bare, "rotary_local": local, "bare_local": {**bare, **local}}
    names = [
        ("rotary" if turns else "bare") + ("_local" if window and kind == layers.SLIDING else "")
        for turns, kind in zip(rotated, types, strict=True)
    ]
    return {**fields, **layers.of_kinds(names, kinds)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    windows = layers.write_windowed(spec)
    return {
        **decoder.shortened(LLAMA.to_config(spec), spec),
        **layers.write_rotated_layers(spec),
        "no_rope_layer_interval": _INTERVAL,
        **windows,
        "use_sliding_window": windows["sliding_window"] is not None,
    }


FAMILY = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    values={"tied": True},
    without_effect=frozenset({"max_window_layers"}),
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {"smollm3-3b": size(36, 2048, 16, 4, 11008, 2e-4)},
    seq_len=4096,
    head_dim=128,
    vocab_size=128256,
    max_seq_len=65536,
    rope_theta=5000000.0,
    norm_eps=1e-6,
    tied=True,
    blocks={"rotary": {}, "bare": {"positions": "none"}},
    pattern=["3*rotary", "bare"],
)
RELEASES = ("SmolLM3-3B",)
