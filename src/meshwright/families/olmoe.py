"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): experts in all layers, and norms of all query and key heads together.

The preset has the dimensions of the released config file and the learning rate of the paper.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes, whole_width
from meshwright.families.llama import gated_decoder_config, gated_decoder_fields
from meshwright.families.mixtral import BALANCE_LOSS_NOTE, refuse_dense
from meshwright.families.qwen3_moe import QWEN3_MOE
from meshwright.spec.model import ModelSpec


def routed_fields(config: HFConfig, experts: int, per_token: int) -> dict[str, Any]:
    """The ModelSpec fields of a model with experts in all layers; the numbers are defaults of the class."""
    config.expect("attention_bias", False)
    config.expect("clip_qkv")
    config.note_unused(BALANCE_LOSS_NOTE, "router_aux_loss_coef")
    return {
        **gated_decoder_fields(config),
        "experts": config.integer("num_experts", "num_local_experts", default=experts),
        "experts_per_token": config.integer("num_experts_per_tok", default=per_token),
        "expert_hidden": config.integer("intermediate_size"),
        "normalised_routing": config.flag("norm_topk_prob", False),
    }


def routed_config(spec: ModelSpec) -> dict[str, Any]:
    """The config.json keys of such a model."""
    refuse_dense(spec, "OLMo")
    return {
        **whole_width(gated_decoder_config(spec), spec),
        "attention_bias": False,
        "intermediate_size": spec.expert_hidden,
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "norm_topk_prob": spec.normalised_routing,
        "output_router_logits": False,
    }


FAMILY = OLMOE = replace(
    QWEN3_MOE,
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    score_class=None,
    modules={ours: theirs for ours, theirs in QWEN3_MOE.modules.items() if not ours.startswith("mlp.")},
    values={"qk_norm": True, "qk_norm_whole": True, "normalised_routing": False},
    without_effect=frozenset(),
    from_config=lambda config: {**routed_fields(config, 64, 8), "norm_eps": config.number("rms_norm_eps", 1e-5)},
    to_config=routed_config,
)
PRESETS = {
    "olmoe-1b-7b": Preset(
        model={
            **sizes(16, 2048, 16, 1024),
            "kv_heads": 16,
            "head_dim": 128,
            "vocab_size": 50304,
            "max_seq_len": 4096,
            "norm_eps": 1e-5,
            "experts": 64,
            "experts_per_token": 8,
            "expert_hidden": 1024,
        },
        learning_rate=4e-4,
        seq_len=4096,
    )
}
