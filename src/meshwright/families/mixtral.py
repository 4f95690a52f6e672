"""Mixtral (Jiang et al. 2024): Llama with an MoE feed-forward network in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Key, presets, size
from meshwright.families.keys import decoder, experts, layers
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_EXPERTS = experts.keys(Key("num_local_experts", 8, "num_experts"), 2, Key("intermediate_size"))


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("router_jitter_noise", 0, 0.0)
    fields = {**decoder.read(config, norm_eps=1e-5, base=1e6), **experts.read(config, _EXPERTS)}
    return {**fields, "sliding_window": layers.read_window(config)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    keys = {**decoder.write(spec), **experts.write(spec, _EXPERTS, "Mixtral")}
    return {**keys, "sliding_window": spec.sliding_window, "router_jitter_noise": 0.0}


FAMILY = MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    modules={
        **experts.without_dense(LLAMA.modules),
        "moe.router": ("block_sparse_moe.gate",),
        "moe.experts.gate_up": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        "moe.experts.down": ("block_sparse_moe.experts.{expert}.w2",),
    },
    required=experts.REQUIRED,
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {"mixtral-8x7b": size(32, 4096, 32, 8, 14336, 3e-4, experts=8, experts_per_token=2, expert_hidden=14336)},
    seq_len=8192,
    head_dim=128,
    vocab_size=32000,
    max_seq_len=32768,
    rope_theta=1000000.0,
)
RELEASES = ("Mixtral-8x7B-Instruct-v0.1",)
