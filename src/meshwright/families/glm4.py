"""GLM-4-0414 (GLM Team 2025):

Llama with norms of inputs and outputs. RoPE rotates pairs of neighbours in the first half of each head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import ConfigKeys, HFConfig, Key, presets, size
from meshwright.families.keys import decoder
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_KEYS = ConfigKeys({"qkv_bias": Key("attention_bias", True)})


def _from_config(config: HFConfig) -> dict[str, Any]:
    return {**decoder.read(config, head_dim=128, share=0.5), **_KEYS.read(config)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**decoder.write(spec, share=True), **_KEYS.write(spec)}


FAMILY = GLM4 = replace(
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
PRESETS = presets(
    {
        "glm4-9b": size(40, 4096, 32, 2, 13696, 3e-4),
        "glm4-32b": size(61, 6144, 48, 8, 23040, 1.5e-4, qkv_bias=False),
    },
    seq_len=8192,
    head_dim=128,
    rope_width=64,
    vocab_size=151552,
    max_seq_len=32768,
)
RELEASES = ("GLM-4-9B-0414", "GLM-4-32B-0414")
