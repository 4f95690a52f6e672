"""GLM-4-0414 (GLM Team 2025): norms of inputs and outputs; neighbours in the first half of each head are rotated.

The presets have the dimensions of the released config files. Learning rates were not published: these are those of other models of like
size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, read_share, sizes
from meshwright.families.llama import LLAMA, gated_decoder_config, gated_decoder_fields
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = gated_decoder_fields(config, without_effect=frozenset({"partial_rotary_factor"}))
    head_dim = config.integer("head_dim", default=128)
    bias = config.flag("attention_bias", True)
    return {**fields, "head_dim": head_dim, "qkv_bias": bias, **read_share(config, head_dim, 0.5)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**share_keys(spec), "attention_bias": spec.qkv_bias}


def share_keys(spec: ModelSpec) -> dict[str, Any]:
    """The config.json keys of `gated_decoder_config`, and the rotated share of heads."""
    config, share = gated_decoder_config(spec), {"partial_rotary_factor": spec.rotary_dim / spec.head_dim}
    return {**config, **share, "rope_parameters": {**config["rope_parameters"], **share}}


FAMILY = replace(
    LLAMA,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    modules={
        **LLAMA.modules,
        "attention_output_norm": ("post_self_attn_layernorm",),
        "mlp.gate_up": ("mlp.gate_up_proj",),
        "mlp_output_norm": ("post_mlp_layernorm",),
    },
    values={"rope_pairs": "neighbours", "output_norms": True, "qkv_bias": True},
    from_config=_from_config,
    to_config=_to_config,
)
_RELEASED = {"head_dim": 128, "rope_width": 64, "vocab_size": 151552, "max_seq_len": 32768}
PRESETS = {
    "glm4-9b": Preset(
        model={**sizes(40, 4096, 32, 13696), **_RELEASED, "kv_heads": 2}, learning_rate=3e-4, seq_len=8192
    ),
    "glm4-32b": Preset(
        model={**sizes(61, 6144, 48, 23040), **_RELEASED, "kv_heads": 8, "qkv_bias": False},
        learning_rate=1.5e-4,
        seq_len=8192,
    ),
}
