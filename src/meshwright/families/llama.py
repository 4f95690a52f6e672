"""Llama 2 and 3.x (Touvron et al. 2023, Grattafiori et al. 2024).

The presets have the dimensions of the released config files. `llama-nano` is the laptop-sized model of the quick start.
"""

from __future__ import annotations

from typing import Any

from meshwright.families.format import Family, HFConfig, Preset, read_rope, sizes, write_rope
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

NO_DROPOUT = "Meshwright trains without dropout, and evaluation has none"


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("rope_interleaved", False)
    bias = config.flag("attention_bias", False)
    if config.flag("mlp_bias", False) != bias:
        expected = f"{bias} (as attention_bias): this decoder has biases in every projection or in none"
        raise config.error("mlp_bias", not bias, expected)
    return {**gated_decoder_fields(config), "bias": bias}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    if spec.hidden % spec.heads:
        raise BadInput(f"model.heads: a Llama folder needs heads that divide hidden ({spec.hidden}), got {spec.heads}")
    return {**gated_decoder_config(spec), "attention_bias": spec.bias, "mlp_bias": spec.bias}


def gated_decoder_fields(config: HFConfig, **rope: Any) -> dict[str, Any]:
    """The ModelSpec fields that Llama, Mixtral, Qwen3 and others share; `rope` are options of `read_rope`."""
    config.expect("hidden_act", "silu", "swish")
    config.note_unused(NO_DROPOUT, "attention_dropout")
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    return {
        "layers": config.integer("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.integer("num_key_value_heads", default=heads),
        "head_dim": config.integer("head_dim", default=max(1, hidden // heads)),
        "ffn_hidden": config.integer("intermediate_size"),
        "vocab_size": config.integer("vocab_size"),
        "max_seq_len": config.integer("max_position_embeddings"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "init_std": config.number("initializer_range", 0.02),
        **read_rope(config, **rope),
    }


def gated_decoder_config(spec: ModelSpec) -> dict[str, Any]:
    """The config.json keys that Llama, Mixtral and Qwen3 share."""
    return {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "initializer_range": spec.init_std,
        "attention_dropout": 0.0,
        **write_rope(spec),
    }


_RELEASED = {
    "kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_seq_len": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0},
    "norm_eps": 1e-5,
}
_SMALL = {"tied": True, "rope_scaling": {"factor": 32.0}}

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
PRESETS = {
    "llama3-1b": Preset(
        model=_RELEASED | sizes(16, 2048, 32, 8192) | _SMALL | {"head_dim": 64}, learning_rate=4e-4, seq_len=8192
    ),
    "llama3-3b": Preset(model=_RELEASED | sizes(28, 3072, 24, 8192) | _SMALL, learning_rate=3e-4, seq_len=8192),
    "llama3-8b": Preset(model=_RELEASED | sizes(32, 4096, 32, 14336), learning_rate=3e-4, seq_len=8192),
    "llama3-70b": Preset(model=_RELEASED | sizes(80, 8192, 64, 28672), learning_rate=1.5e-4, seq_len=8192),
    "llama3-405b": Preset(model=_RELEASED | sizes(126, 16384, 128, 53248), learning_rate=8e-5, seq_len=8192),
    "llama-nano": Preset(
        model=sizes(4, 256, 4, 640)
        | {"kv_heads": 2, "head_dim": 64, "vocab_size": 0, "max_seq_len": 1024, "tied": True},
        learning_rate=3e-3,
        seq_len=256,
    ),
}
