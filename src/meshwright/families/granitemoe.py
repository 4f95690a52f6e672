"""Granite 3 MoE (IBM 2024): Granite's factors, and experts in all layers.

The presets have the dimensions of the released config files of version 3.1. Their learning rates were not published: these are those of
other models of like size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes, whole_width
from meshwright.families.granite import factor_keys, factors
from meshwright.families.llama import LLAMA, gated_decoder_config, gated_decoder_fields
from meshwright.families.mixtral import BALANCE_LOSS_NOTE, EXPERTS, refuse_dense
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.note_unused(BALANCE_LOSS_NOTE, "router_aux_loss_coef")
    fields, bias = gated_decoder_fields(config), config.flag("attention_bias", False)
    return {
        **fields,
        **factors(config, fields["head_dim"]),
        "qkv_bias": bias,
        "out_bias": bias,
        "experts": config.integer("num_local_experts", default=8),
        "experts_per_token": config.integer("num_experts_per_tok", default=2),
        "expert_hidden": config.integer("intermediate_size"),
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    refuse_dense(spec, "Granite MoE")
    return {
        **whole_width(gated_decoder_config(spec), spec),
        **factor_keys(spec),
        "attention_bias": spec.qkv_bias,
        "intermediate_size": spec.expert_hidden,
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "output_router_logits": False,
    }


FAMILY = GRANITEMOE = replace(
    LLAMA,
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    score_class=None,
    modules={
        **{ours: theirs for ours, theirs in LLAMA.modules.items() if not ours.startswith("mlp.")},
        "moe.router": ("block_sparse_moe.router.layer",),
        "moe.experts.gate_up": ("block_sparse_moe.input_linear.weight",),
        "moe.experts.down": ("block_sparse_moe.output_linear.weight",),
    },
    required=EXPERTS,
    from_config=_from_config,
    to_config=_to_config,
)


def _preset(layers: int, hidden: int, heads: int, experts: int, learning_rate: float) -> Preset:
    model = {
        **sizes(layers, hidden, heads, 512),
        "kv_heads": 8,
        "head_dim": 64,
        "vocab_size": 49155,
        "max_seq_len": 131072,
        "rope_theta": 1_500_000.0,
        "norm_eps": 1e-6,
        "embedding_scale": 12.0,
        "residual_factor": 0.22,
        "logit_factor": 1 / 6,
        "score_scale": 1 / 64,
        "tied": True,
        "experts": experts,
        "experts_per_token": 8,
        "expert_hidden": 512,
    }
    return Preset(model=model, learning_rate=learning_rate, seq_len=4096)


PRESETS = {
    "granite3.1-1b-a400m": _preset(24, 1024, 16, 32, 6e-4),
    "granite3.1-3b-a800m": _preset(32, 1536, 24, 40, 4e-4),
}
