"""gpt-oss (OpenAI 2025, arXiv 2508.10925): experts with biases and a clamped SwiGLU, attention sinks, alternating windows.

Released folders have experts in MXFP4 (`families.quantization`). These weights are transposed compared with a folder in
bf16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Key, presets, size
from meshwright.families.keys import decoder, experts, layers
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_CLASS = {"num_hidden_layers": 36, "intermediate_size": 2880, "hidden_size": 2880, "num_attention_heads": 64}
_CLASS |= {"num_key_value_heads": 8, "vocab_size": 201_088, "max_position_embeddings": 131_072}
"""Defaults of the class."""
_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
"""The RoPE section if config.json has none."""
_EXPERTS = experts.keys(Key("num_local_experts", 128, "num_experts"), 4, Key("intermediate_size"))


def _from_config(config: HFConfig) -> dict[str, Any]:
    rotated = config.get("rope_parameters") is not None or config.get("rope_scaling") is not None
    values = {**_CLASS, **({} if rotated else {"rope_parameters": _ROPE}), **config.values}
    values["num_experts_per_tok"] = config.get("num_experts_per_tok", config.get("experts_per_token"))
    config = replace(config, values=values)
    for key, only in {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}.items():
        config.expect(key, only)
    fields = decoder.read(config, head_dim=64, norm_eps=1e-5, base=150_000.0)
    types = layers.read_types(config, layers.periodic(fields["layers"], 2))
    windowed = layers.windowed(types, config.integer("sliding_window", default=128))
    return {**fields, **experts.read(config, _EXPERTS), **windowed}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    keys = {**decoder.write(spec), **experts.write(spec, _EXPERTS, "gpt-oss"), **layers.write_windowed(spec)}
    return {**keys, "attention_bias": True, "swiglu_limit": 7.0}


_STACKED = experts.STACKED_MODULES
_BIASES = {f"{ours}_bias": (f"{theirs}_bias",) for ours, (theirs,) in _STACKED.items()}
FAMILY = replace(
    LLAMA,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    modules={**experts.without_dense(LLAMA.modules), "moe.router": ("mlp.router",), **_STACKED, **_BIASES},
    tensors=lambda spec: {"attention.sinks": "self_attn.sinks"},
    transposed=frozenset(_STACKED),
    interleaved=frozenset({"moe.experts.gate_up"}),
    values={**dict.fromkeys(("qkv_bias", "out_bias", "sinks", "expert_bias"), True), "mlp": "clamped_swiglu"},
    required=experts.REQUIRED,
    without_effect=frozenset({"initial_context_length", "experts_per_token"}),
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {
        "gpt-oss-20b": size(24, 2880, 64, 8, 2880, 3e-4, experts=32),
        "gpt-oss-120b": size(36, 2880, 64, 8, 2880, 1.5e-4, experts=128),
    },
    seq_len=4096,
    head_dim=64,
    vocab_size=201_088,
    max_seq_len=131_072,
    rope_theta=150_000.0,
    norm_eps=1e-5,
    yarn={"factor": 32.0, "mscale_all_dim": 0.0, "truncate": False},
    experts_per_token=4,
    expert_hidden=2880,
    **layers.windowed(layers.periodic(2, 2), 128),
)
RELEASES = ("gpt-oss-20b", "gpt-oss-120b")
