"""Qwen3 dense (Yang et al. 2025): Llama with a norm on each query and key head, no biases. Presets are as released."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes
from meshwright.families.llama import LLAMA, gated_decoder_config, gated_decoder_fields
from meshwright.families.qwen2 import read_window, write_window
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("attention_bias", False)
    fields = gated_decoder_fields(config)
    return {
        **fields,
        "head_dim": config.integer("head_dim", default=128),
        "sliding_window": read_window(config, fields["layers"]),
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**gated_decoder_config(spec), "attention_bias": False, **write_window(spec)}


RELEASED = {
    "kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_seq_len": 40960,
    "rope_theta": 1000000.0,
    "norm_eps": 1e-6,
}
"""ModelSpec fields that all released models share."""
FAMILY = QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    modules={**LLAMA.modules, "attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",)},
    values={"qk_norm": True},
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = {
    "qwen3-0.6b": Preset(model=RELEASED | sizes(28, 1024, 16, 3072) | {"tied": True}, learning_rate=6e-4, seq_len=8192),
    "qwen3-8b": Preset(model=RELEASED | sizes(36, 4096, 32, 12288), learning_rate=3e-4, seq_len=8192),
}
