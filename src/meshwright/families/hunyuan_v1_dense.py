"""Hunyuan, dense (Tencent 2025):

Llama with norms of queries and keys after RoPE. A constant in config.json stretches the rotary base.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import decoder, rope
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_BUILT_IN = {"use_qk_norm": True, "use_rotary_pos_emb": True, "mlp_bias": False, "use_cla": False}
"""Keys of released folders that the class does not read. The class behaves as if they had these values."""


def _from_config(config: HFConfig) -> dict[str, Any]:
    for key, value in {**_BUILT_IN, "add_classification_head": False}.items():
        config.expect(key, value)
    bias = config.flag("attention_bias", False)
    heads = config.integer("num_attention_heads")
    default = config.integer("attention_head_dim", default=max(1, config.integer("hidden_size") // heads))
    head_dim = config.integer("head_dim", default=default)
    fields = decoder.read(rope.stretched(config, head_dim), head_dim=head_dim, norm_eps=1e-5)
    return {**fields, "qkv_bias": bias, "out_bias": bias}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**decoder.write(spec), "attention_bias": spec.qkv_bias}


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
    from_config=_from_config,
    to_config=_to_config,
)
RELEASED = {"seq_len": 4096, "head_dim": 128, "max_seq_len": 32768, "norm_eps": 1e-5, "tied": True}
"""Fields that all released models have in common."""
PRESETS = presets(
    {"hunyuan-mt-7b": size(32, 4096, 32, 8, 14336, 3e-4)},
    vocab_size=128256,
    rope_theta=rope.stretched_base(10000.0, 100000.0, 128),
    **RELEASED,
)
RELEASES = ("Hunyuan-7B-Instruct", "Hunyuan-MT-7B")
