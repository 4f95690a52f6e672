"""SmolLM3 (Bakouch et al. 2025): Llama in which every fourth layer rotates neither queries nor keys.

The preset has the dimensions of the released base model's config file, its learning rate and first length are those of its published
recipe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes
from meshwright.families.llama import LLAMA
from meshwright.spec.block_pattern import shortest_pattern
from meshwright.spec.model import ModelSpec

_SLIDING, _FULL = "sliding_attention", "full_attention"
_INTERVAL = 4


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = LLAMA.from_config(config)
    layers = fields["layers"]
    interval = config.integer("no_rope_layer_interval", default=_INTERVAL)
    rotated = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or not {0, 1}.issuperset(rotated):
        raise config.error("no_rope_layers", rotated, f"a list of at least {layers} times 1 or 0")
    window = config.integer("sliding_window") if config.flag("use_sliding_window", False) else None
    config.get("sliding_window")
    types = config.get("layer_types") or [_FULL if has_rope or window is None else _SLIDING for has_rope in rotated]
    if not isinstance(types, list) or len(types) < layers or not {_SLIDING, _FULL}.issuperset(types):
        raise config.error("layer_types", types, f"a list of at least {layers} times {_SLIDING} or {_FULL}")
    names = [
        ("rotary" if has_rope else "bare") + ("_local" if kind == _SLIDING and window is not None else "")
        for has_rope, kind in zip(rotated[:layers], types, strict=False)
    ]
    if set(names) == {"rotary"}:
        return fields
    blocks = {
        name: {
            **({"positions": "none"} if name.startswith("bare") else {}),
            **({"sliding_window": window} if name.endswith("_local") else {}),
        }
        for name in dict.fromkeys(names)
    }
    return {**fields, "blocks": blocks, "pattern": list(shortest_pattern(names))}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    config, mixers = LLAMA.to_config(spec), [spec.block(layer).mixer for layer in range(spec.layers)]
    if spec.head_dim * spec.heads == spec.hidden:
        del config["head_dim"]  # released folders do not have it, and readers compute it
    windows = [mixer.window for mixer in mixers]
    window = next((window for window in windows if window is not None), None)
    return {
        **config,
        "no_rope_layers": [int(mixer.rotary is not None) for mixer in mixers],
        "no_rope_layer_interval": _INTERVAL,
        "layer_types": [_FULL if window is None else _SLIDING for window in windows],
        "use_sliding_window": window is not None,
        "sliding_window": window,
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
PRESETS = {
    "smollm3-3b": Preset(
        model={
            **sizes(36, 2048, 16, 11008),
            "kv_heads": 4,
            "head_dim": 128,
            "vocab_size": 128256,
            "max_seq_len": 65536,
            "rope_theta": 5000000.0,
            "norm_eps": 1e-6,
            "tied": True,
            "blocks": {"rotary": {}, "bare": {"positions": "none"}},
            "pattern": ["3*rotary", "bare"],
        },
        learning_rate=2e-4,
        seq_len=4096,
    )
}
