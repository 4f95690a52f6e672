"""OLMo 2 (OLMo Team 2025, arXiv 2501.00656): norms of outputs instead of inputs.

One norm covers all query heads, and one all key heads. The learning rates of the presets are the paper's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import decoder
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("attention_bias", False)
    config.expect("clip_qkv")
    return decoder.read(config)


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**decoder.shortened(decoder.write(spec), spec), "attention_bias": False}


FAMILY = OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    modules={
        **LLAMA.modules,
        **decoder.HEAD_NORMS,
        "attention_output_norm": ("post_attention_layernorm",),
        "mlp_output_norm": ("post_feedforward_layernorm",),
    },
    values={"qk_norm": True, "qk_norm_whole": True, "input_norms": False, "output_norms": True},
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {
        "olmo2-1b": size(16, 2048, 16, 16, 8192, 4e-4),
        "olmo2-7b": size(32, 4096, 32, 32, 11008, 3e-4),
        "olmo2-13b": size(40, 5120, 40, 40, 13824, 9e-4),
        "olmo2-32b": size(64, 5120, 40, 8, 27648, 6e-4),
    },
    seq_len=4096,
    head_dim=128,
    vocab_size=100352,
    max_seq_len=4096,
    rope_theta=500000.0,
    norm_eps=1e-6,
)
RELEASES = ("OLMo-2-0425-1B-Instruct", "OLMo-2-1124-7B-Instruct", "OLMo-2-0325-32B-Instruct")
