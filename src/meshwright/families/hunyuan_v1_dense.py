"""Hunyuan, dense (Tencent 2025): norms of queries and keys behind rotation, whose base a constant stretches.

The preset has the dimensions of the released config file. Its learning rate was not published: it is that of other models of like size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, rope_section, sizes
from meshwright.families.llama import LLAMA, gated_decoder_config, gated_decoder_fields
from meshwright.spec.model import ModelSpec

BUILT_IN = {"use_qk_norm": True, "use_rotary_pos_emb": True, "mlp_bias": False, "use_cla": False}
"""Keys of released folders that the class does not read, with the values that it has built in."""


def decoder_fields(config: HFConfig) -> dict[str, Any]:
    """The ModelSpec fields of both Hunyuan families."""
    for key, value in {**BUILT_IN, "add_classification_head": False}.items():
        config.expect(key, value)
    bias, heads = config.flag("attention_bias", False), config.integer("num_attention_heads")
    default = config.integer("attention_head_dim", default=max(1, config.integer("hidden_size") // heads))
    head_dim = config.integer("head_dim", default=default)
    fields = gated_decoder_fields(_stretched(config, head_dim))
    norm_eps = config.number("rms_norm_eps", 1e-5)
    return {**fields, "head_dim": head_dim, "norm_eps": norm_eps, "qkv_bias": bias, "out_bias": bias}


def stretched(base: float, alpha: float, head_dim: int) -> float:
    """The base that `alpha` makes of another one, so that the lowest frequency falls by about 1 / alpha."""
    return base * alpha ** (head_dim / (head_dim - 2))


def _stretched(config: HFConfig, head_dim: int) -> HFConfig:
    """The config.json with the resulting base in place of a `dynamic` section, which in these families has `alpha`."""
    key, section = rope_section(config)
    if (section.get("rope_type") or section.get("type")) != "dynamic":
        return config
    inside = HFConfig({"rope_theta": config.get("rope_theta"), **section}, f"{config.where}: {key}")
    base = stretched(inside.number("rope_theta", 10000.0), inside.number("alpha"), head_dim)
    rope = {"rope_type": "default", "rope_theta": base}
    return replace(config, values={**config.values, "rope_theta": None, "rope_scaling": None, "rope_parameters": rope})


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**gated_decoder_config(spec), "attention_bias": spec.qkv_bias}


FAMILY = HUNYUAN = replace(
    LLAMA,
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    modules={
        **LLAMA.modules,
        "attention.q_norm": ("self_attn.query_layernorm",),
        "attention.k_norm": ("self_attn.key_layernorm",),
    },
    values={"qk_norm": True, "qk_norm_rotated": True},
    without_effect=frozenset({"eod_token_id"}),
    from_config=decoder_fields,
    to_config=_to_config,
)
RELEASED = {"kv_heads": 8, "head_dim": 128, "max_seq_len": 32768, "tied": True}
PRESETS = {
    "hunyuan-mt-7b": Preset(
        model={
            **sizes(32, 4096, 32, 14336),
            **RELEASED,
            "vocab_size": 128256,
            "norm_eps": 1e-5,
            "rope_theta": stretched(10000.0, 100000.0, 128),
        },
        learning_rate=3e-4,
        seq_len=4096,
    )
}
