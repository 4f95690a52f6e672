"""Qwen3 dense (Yang et al. 2025) in Hugging Face folders: Llama with a norm on each query and key head, no biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.models.hf_config import DEEPSEEK_FIELDS, HFConfig
from meshwright.models.llama import LLAMA, gated_decoder_config, gated_decoder_fields
from meshwright.spec.model import ModelSpec

_SLIDING = "sliding_attention"
_FULL = "full_attention"


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("attention_bias", False)
    fields = gated_decoder_fields(config)
    return {
        **fields,
        "head_dim": config.integer("head_dim", default=128),
        "sliding_window": _window(config, fields["layers"]),
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    sliding = spec.sliding_window is not None
    return {
        **gated_decoder_config(spec),
        "attention_bias": False,
        "use_sliding_window": sliding,
        "sliding_window": spec.sliding_window,
        "max_window_layers": 0 if sliding else spec.layers,
        "layer_types": [_SLIDING if sliding else _FULL] * spec.layers,
    }


def _window(config: HFConfig, layers: int) -> int | None:
    """The sliding window of all layers, or None; raises BadInput if only some layers have a window."""
    if not config.flag("use_sliding_window", False):
        return None
    first = config.values.get("max_window_layers", 28)
    types = config.values.get("layer_types") or [_FULL if layer < first else _SLIDING for layer in range(layers)]
    if set(types) == {_FULL}:
        return None
    if set(types) != {_SLIDING}:
        key = "layer_types" if config.values.get("layer_types") else "max_window_layers"
        expected = "the same attention in all layers: this decoder has a sliding window in every layer or in none"
        raise config.error(key, config.values.get(key), expected)
    return config.integer("sliding_window", default=4096)


QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    modules={**LLAMA.modules, "attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",)},
    fixed={
        **DEEPSEEK_FIELDS,
        "positions": "rope",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "qk_norm": True,
        "bias": False,
        "parallel_block": False,
        "experts": 0,
    },
    from_config=_from_config,
    to_config=_to_config,
)
