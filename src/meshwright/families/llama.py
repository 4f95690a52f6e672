"""Llama 2 and Llama 3 (Touvron et al. 2023, Grattafiori et al. 2024).

`llama-nano` is the small model of the quick start, for a laptop.
"""

from __future__ import annotations

from typing import Any

from meshwright.families.format import Family, HFConfig, presets, size
from meshwright.families.keys import decoder
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("rope_interleaved", False)
    bias = config.flag("attention_bias", False)
    if config.flag("mlp_bias", False) != bias:
        expected = f"{bias} (as attention_bias): this decoder has biases in every projection or in none"
        raise config.error("mlp_bias", not bias, expected)
    return {**decoder.read(config), "bias": bias}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    if spec.hidden % spec.heads:
        raise BadInput(f"model.heads: a Llama folder needs heads that divide hidden ({spec.hidden}), got {spec.heads}")
    return {**decoder.write(spec), "attention_bias": spec.bias, "mlp_bias": spec.bias}


FAMILY = LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    base="model.",
    layer="model.layers.{layer}.",
    ends={"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    modules={
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
    unused=("rotary_emb.inv_freq",),
    without_effect=frozenset({"is_llama_config", "max_sequence_length"}),
    from_config=_from_config,
    to_config=_to_config,
)
_SMALL = {"tied": True, "rope_scaling": {"factor": 32.0}}
PRESETS = presets(
    {
        "llama3-1b": size(16, 2048, 32, 8, 8192, 4e-4, **_SMALL, head_dim=64),
        "llama3-3b": size(28, 3072, 24, 8, 8192, 3e-4, **_SMALL),
        "llama3-8b": size(32, 4096, 32, 8, 14336, 3e-4),
        "llama3-70b": size(80, 8192, 64, 8, 28672, 1.5e-4),
        "llama3-405b": size(126, 16384, 128, 8, 53248, 8e-5),
    },
    seq_len=8192,
    head_dim=128,
    vocab_size=128256,
    max_seq_len=131072,
    rope_theta=500000.0,
    rope_scaling={"factor": 8.0},
    norm_eps=1e-5,
) | presets(
    {"llama-nano": size(4, 256, 4, 2, 640, 3e-3)}, seq_len=256, head_dim=64, vocab_size=0, max_seq_len=1024, tied=True
)
RELEASES = (
    "Llama-3.1-8B-Instruct",
    "Llama-3.2-1B-Instruct",
    "Llama-3.3-70B-Instruct",
    "Llama-2-7b-chat-hf",
    "SmolLM2-1.7B-Instruct",
)
