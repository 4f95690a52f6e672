"""gpt-oss (OpenAI 2025, arXiv 2508.10925): experts with biases and a clamped activation, attention with sinks, alternating windows.

The presets are as released. Their learning rates were not published: these are those of other models of like size. Released folders
have weights in MXFP4; `families.folder` says how to convert them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import (
    HFConfig,
    Preset,
    alternating,
    read_rope,
    sizes,
    windowed_layers,
    write_rope,
    written_layers,
)
from meshwright.families.gemma3_text import layer_types
from meshwright.families.llama import LLAMA, NO_DROPOUT
from meshwright.families.mixtral import BALANCE_LOSS_NOTE, EXPERTS, refuse_dense
from meshwright.spec.model import ModelSpec

_YARN = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_ROPE = {"rope_type": "yarn", "rope_theta": 150_000.0, **_YARN}
"""The rotation of a config.json without one."""


def _from_config(config: HFConfig) -> dict[str, Any]:
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = replace(config, values={**config.values, "rope_parameters": _ROPE})
    for key, only in {"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}.items():
        config.expect(key, only)
    config.note_unused(NO_DROPOUT, "attention_dropout")
    config.note_unused(BALANCE_LOSS_NOTE, "router_aux_loss_coef")
    layers, width = config.integer("num_hidden_layers", default=36), config.integer("intermediate_size", default=2880)
    types, window = layer_types(config, layers, 2), config.integer("sliding_window", default=128)
    return {
        "layers": layers,
        "hidden": config.integer("hidden_size", default=2880),
        "heads": config.integer("num_attention_heads", default=64),
        "kv_heads": config.integer("num_key_value_heads", default=8),
        "head_dim": config.integer("head_dim", default=64),
        "ffn_hidden": width,
        "vocab_size": config.integer("vocab_size", default=201_088),
        "max_seq_len": config.integer("max_position_embeddings", default=131_072),
        "norm_eps": config.number("rms_norm_eps", 1e-5),
        "init_std": config.number("initializer_range", 0.02),
        "experts": config.integer("num_local_experts", "num_experts", default=128),
        "experts_per_token": config.integer("num_experts_per_tok", "experts_per_token", default=4),
        "expert_hidden": width,
        **read_rope(config, base=150_000.0),
        **windowed_layers(types, window),
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    refuse_dense(spec, "gpt-oss")
    return {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.expert_hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "initializer_range": spec.init_std,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "swiglu_limit": 7.0,
        "output_router_logits": False,
        **write_rope(spec),
        **written_layers(spec),
    }


_STACKED = {f"moe.experts.{ours}": (f"mlp.experts.{ours}_proj",) for ours in ("gate_up", "down")}
_BIASES = {f"{ours}_bias": (f"{theirs}_bias",) for ours, (theirs,) in _STACKED.items()}
FAMILY = replace(
    LLAMA,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    modules={
        **{ours: theirs for ours, theirs in LLAMA.modules.items() if not ours.startswith("mlp.")},
        "moe.router": ("mlp.router",),
        **_STACKED,
        **_BIASES,
    },
    tensors=lambda spec: {"attention.sinks": "self_attn.sinks"},
    transposed=frozenset(_STACKED),
    interleaved=frozenset({"moe.experts.gate_up"}),
    values={**dict.fromkeys(("qkv_bias", "out_bias", "sinks", "expert_bias"), True), "mlp": "clamped_swiglu"},
    required=EXPERTS,
    without_effect=frozenset({"initial_context_length", "experts_per_token"}),
    from_config=_from_config,
    to_config=_to_config,
)


def _preset(layers: int, experts: int, learning_rate: float) -> Preset:
    model = {
        **sizes(layers, 2880, 64, 2880),
        "kv_heads": 8,
        "head_dim": 64,
        "vocab_size": 201_088,
        "max_seq_len": 131_072,
        "rope_theta": 150_000.0,
        "norm_eps": 1e-5,
        "yarn": {"factor": 32.0, "mscale_all_dim": 0.0, "truncate": False},
        "experts": experts,
        "experts_per_token": 4,
        "expert_hidden": 2880,
        **windowed_layers(alternating(2), 128),
    }
    return Preset(model=model, learning_rate=learning_rate, seq_len=4096)


PRESETS = {"gpt-oss-20b": _preset(24, 32, 3e-4), "gpt-oss-120b": _preset(36, 128, 1.5e-4)}
