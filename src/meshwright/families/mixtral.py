"""Mixtral (Jiang et al. 2024): Llama with a mixture of experts in every layer. The preset is as released."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, rope_section, sizes
from meshwright.families.llama import LLAMA, gated_decoder_config, gated_decoder_fields
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

BALANCE_LOSS_NOTE = "Meshwright weighs the experts' balance loss by train.balance_loss"
_ROPE = {"rope_theta": 1e6}
_DEFAULTS = {"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2}
"""Defaults of transformers that differ from those for Llama."""


def _from_config(config: HFConfig) -> dict[str, Any]:
    _, rope = rope_section(config)
    config = replace(config, values={**_DEFAULTS, **({} if "rope_theta" in rope else _ROPE), **config.values})
    config.expect("router_jitter_noise", 0, 0.0)
    config.note_unused(BALANCE_LOSS_NOTE, "router_aux_loss_coef")
    return {
        **gated_decoder_fields(config),
        "sliding_window": None if config.get("sliding_window") is None else config.integer("sliding_window"),
        "experts": config.integer("num_local_experts", "num_experts"),
        "experts_per_token": config.integer("num_experts_per_tok"),
        "expert_hidden": config.integer("intermediate_size"),
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    refuse_dense(spec, "Mixtral")
    return {
        **gated_decoder_config(spec),
        "intermediate_size": spec.expert_hidden,
        "sliding_window": spec.sliding_window,
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "output_router_logits": False,
        "router_jitter_noise": 0.0,
    }


def refuse_dense(spec: ModelSpec, folder: str) -> None:
    """Raise BadInput for a model without experts."""
    if not spec.experts:
        raise BadInput(f"model.experts: a {folder} folder needs experts, got 0")


EXPERTS = ("experts", "experts_per_token", "expert_hidden")
"""ModelSpec fields that a run with experts must give."""
FAMILY = MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    modules={
        **{ours: theirs for ours, theirs in LLAMA.modules.items() if not ours.startswith("mlp.")},
        "moe.router": ("block_sparse_moe.gate",),
        "moe.experts.gate_up": ("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        "moe.experts.down": ("block_sparse_moe.experts.{expert}.w2",),
    },
    required=EXPERTS,
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = {
    "mixtral-8x7b": Preset(
        model={
            **sizes(32, 4096, 32, 14336),
            "kv_heads": 8,
            "head_dim": 128,
            "vocab_size": 32000,
            "max_seq_len": 32768,
            "rope_theta": 1000000.0,
            "experts": 8,
            "experts_per_token": 2,
            "expert_hidden": 14336,
        },
        learning_rate=3e-4,
        seq_len=8192,
    )
}
