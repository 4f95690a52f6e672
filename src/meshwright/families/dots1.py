"""dots.llm1 (rednote-hilab 2025, arXiv 2506.05767): DeepSeek-V3's routing beside Qwen3's attention.

The preset has the dimensions of the released config file and the learning rate of the paper.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import (
    FULL,
    SLIDING,
    HFConfig,
    Preset,
    read_layer_types,
    read_sliding_window,
    sizes,
    windowed_layers,
    written_layers,
)
from meshwright.families.glm4_moe import GLM4_MOE, routed_fields, routed_keys
from meshwright.families.llama import gated_decoder_config, gated_decoder_fields
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("attention_bias", False)
    config.expect("scoring_func", "noaux_tc", "sigmoid")
    fields, window = gated_decoder_fields(config), read_sliding_window(config, 4096)
    first = config.get("max_window_layers", 62)
    types = [SLIDING if window and layer >= first else FULL for layer in range(fields["layers"])]
    routed = routed_fields(config, normalised=False, dense=0)
    return {**fields, **routed, **windowed_layers(read_layer_types(config, types), window)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    keys = {**gated_decoder_config(spec), "attention_bias": False, **routed_keys(spec, "dots.llm1")}
    return {**keys, **written_layers(spec)}


FAMILY = replace(
    GLM4_MOE,
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    score_class=None,
    predictions={},
    prediction_copies={},
    values={"router": "sigmoid", "qk_norm": True},
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = {
    "dots-llm1": Preset(
        model={
            **sizes(62, 4096, 32, 10944),
            "kv_heads": 32,
            "head_dim": 128,
            "vocab_size": 152064,
            "max_seq_len": 32768,
            "rope_theta": 10_000_000.0,
            "norm_eps": 1e-5,
            "experts": 128,
            "experts_per_token": 6,
            "expert_hidden": 1408,
            "shared_expert_hidden": 2816,
            "first_dense_layers": 1,
            "routing_scale": 2.5,
        },
        learning_rate=3e-4,
        seq_len=8192,
    )
}
