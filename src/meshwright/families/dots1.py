"""dots.llm1 (rednote-hilab 2025, arXiv 2506.05767): the routing of DeepSeek-V3 together with the attention of Qwen3.

The learning rate of the preset is the paper's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.glm4_moe import GLM4_MOE
from meshwright.families.keys import decoder, experts, layers
from meshwright.spec.model import ModelSpec

_ROUTED = experts.routed(normalised=False, dense=0)


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("attention_bias", False)
    config.expect("scoring_func", "noaux_tc", "sigmoid")
    fields = decoder.read(config)
    window = layers.read_window(config, 4096)
    first = config.get("max_window_layers", 62)
    types = [layers.SLIDING if window and layer >= first else layers.FULL for layer in range(fields["layers"])]
    windowed = layers.windowed(layers.read_types(config, types), window)
    return {**fields, **experts.read_routed(config, _ROUTED), **windowed}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    keys = {**decoder.write(spec), "attention_bias": False, **experts.write_routed(spec, _ROUTED, "dots.llm1")}
    return {**keys, **layers.write_windowed(spec)}


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
PRESETS = presets(
    {"dots-llm1": size(62, 4096, 32, 32, 10944, 3e-4, experts=128, experts_per_token=6, first_dense_layers=1)},
    seq_len=8192,
    head_dim=128,
    vocab_size=152064,
    max_seq_len=32768,
    rope_theta=10_000_000.0,
    norm_eps=1e-5,
    expert_hidden=1408,
    shared_expert_hidden=2816,
    routing_scale=2.5,
)
RELEASES = ("dots.llm1.inst",)
