"""OLMo 2 (OLMo Team 2025, arXiv 2501.00656): norms of outputs instead of inputs, and of all query and key heads together.

The presets have the dimensions of the released config files, and the learning rates of the paper.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes, whole_width
from meshwright.families.llama import LLAMA, gated_decoder_config, gated_decoder_fields
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("attention_bias", False)
    config.expect("clip_qkv")
    return gated_decoder_fields(config)


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**whole_width(gated_decoder_config(spec), spec), "attention_bias": False}


FAMILY = OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    modules={
        **LLAMA.modules,
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
        "attention_output_norm": ("post_attention_layernorm",),
        "mlp_output_norm": ("post_feedforward_layernorm",),
    },
    values={"qk_norm": True, "qk_norm_whole": True, "input_norms": False, "output_norms": True},
    from_config=_from_config,
    to_config=_to_config,
)
_RELEASED = {"head_dim": 128, "vocab_size": 100352, "max_seq_len": 4096, "rope_theta": 500000.0, "norm_eps": 1e-6}
PRESETS = {
    "olmo2-1b": Preset(
        model={**sizes(16, 2048, 16, 8192), **_RELEASED, "kv_heads": 16}, learning_rate=4e-4, seq_len=4096
    ),
    "olmo2-7b": Preset(
        model={**sizes(32, 4096, 32, 11008), **_RELEASED, "kv_heads": 32}, learning_rate=3e-4, seq_len=4096
    ),
    "olmo2-13b": Preset(
        model={**sizes(40, 5120, 40, 13824), **_RELEASED, "kv_heads": 40}, learning_rate=9e-4, seq_len=4096
    ),
    "olmo2-32b": Preset(
        model={**sizes(64, 5120, 40, 27648), **_RELEASED, "kv_heads": 8}, learning_rate=6e-4, seq_len=4096
    ),
}
