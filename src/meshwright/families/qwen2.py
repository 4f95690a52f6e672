"""Qwen2 and Qwen2.5 dense (Yang et al. 2024, arXiv 2407.10671 and 2412.15115): Llama with biases of queries, keys and values.

Presets have the dimensions of the released base models' config files. Their learning rates were not published: these
are those of other models of like size. They were trained on sequences of 4,096 tokens before the context was extended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes
from meshwright.families.llama import LLAMA, gated_decoder_config, gated_decoder_fields
from meshwright.spec.model import ModelSpec

_SLIDING = "sliding_attention"
_FULL = "full_attention"


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("use_mrope", False)
    fields = gated_decoder_fields(config)
    return {**fields, "sliding_window": read_window(config, fields["layers"])}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    config = {**gated_decoder_config(spec), **write_window(spec)}
    if spec.head_dim * spec.heads == spec.hidden:
        del config["head_dim"]  # released folders do not have it, and readers compute it
    return config


def read_window(config: HFConfig, layers: int) -> int | None:
    """The sliding window of all layers, or None; raises BadInput if only some layers have a window."""
    first, listed = config.get("max_window_layers", 28), config.get("layer_types")
    types = listed or [_FULL if layer < first else _SLIDING for layer in range(layers)]
    if not config.flag("use_sliding_window", False) or set(types) == {_FULL}:
        config.get("sliding_window")
        return None
    if set(types) != {_SLIDING}:
        key = "layer_types" if listed else "max_window_layers"
        expected = "the same attention in all layers: this decoder has a sliding window in every layer or in none"
        raise config.error(key, config.get(key), expected)
    return config.integer("sliding_window", default=4096)


def write_window(spec: ModelSpec) -> dict[str, Any]:
    """The config.json keys of a sliding window of all layers, or of none."""
    sliding = spec.sliding_window is not None
    return {
        "use_sliding_window": sliding,
        "sliding_window": spec.sliding_window,
        "max_window_layers": 0 if sliding else spec.layers,
        "layer_types": [_SLIDING if sliding else _FULL] * spec.layers,
    }


def _preset(size: dict[str, Any], kv_heads: int, learning_rate: float, **other: Any) -> Preset:
    model = {
        **size,
        "kv_heads": kv_heads,
        "head_dim": size["hidden"] // size["heads"],
        "vocab_size": 152064,
        "max_seq_len": 131072,
        "rope_theta": 1000000.0,
        "norm_eps": 1e-5,
        **other,
    }
    return Preset(model=model, learning_rate=learning_rate, seq_len=4096)


_SMALL = {"vocab_size": 151936, "norm_eps": 1e-6, "tied": True}
FAMILY = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    values={"qkv_bias": True},
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = {
    "qwen2.5-0.5b": _preset(sizes(24, 896, 14, 4864), 2, 6e-4, **_SMALL, max_seq_len=32768),
    "qwen2.5-1.5b": _preset(sizes(28, 1536, 12, 8960), 2, 4e-4, **_SMALL),
    "qwen2.5-3b": _preset(sizes(36, 2048, 16, 11008), 2, 3e-4, **_SMALL, max_seq_len=32768),
    "qwen2.5-7b": _preset(sizes(28, 3584, 28, 18944), 4, 3e-4, norm_eps=1e-6),
    "qwen2.5-14b": _preset(sizes(48, 5120, 40, 13824), 8, 3e-4),
    "qwen2.5-32b": _preset(sizes(64, 5120, 40, 27648), 8, 1.5e-4),
    "qwen2.5-72b": _preset(sizes(80, 8192, 64, 29568), 8, 1.5e-4),
}
