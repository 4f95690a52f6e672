"""GLM-4.5 to 4.7 (GLM Team 2025, arXiv 2508.06471): DeepSeek-V3's routing beside ordinary attention, half of each head rotated.

The presets have the dimensions of the released config files. Learning rates were not published: these are those of other models of like
size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.deepseek_v2 import shared_count, shared_width
from meshwright.families.deepseek_v3 import DEEPSEEK_V3
from meshwright.families.format import HFConfig, Preset, read_share, sizes
from meshwright.families.glm4 import share_keys
from meshwright.families.llama import LLAMA, gated_decoder_fields
from meshwright.families.mixtral import BALANCE_LOSS_NOTE, EXPERTS, refuse_dense
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = gated_decoder_fields(config, without_effect=frozenset({"partial_rotary_factor"}))
    return {
        **fields,
        **read_share(config, fields["head_dim"], 0.5),
        "qkv_bias": config.flag("attention_bias", False),
        "qk_norm": config.flag("use_qk_norm", False),
        "norm_eps": config.number("rms_norm_eps", 1e-5),
        **routed_fields(config, normalised=True, dense=1),
        "prediction_depth": config.get("num_nextn_predict_layers") or 0,
    }


def routed_fields(config: HFConfig, *, normalised: bool, dense: int) -> dict[str, Any]:
    """The ModelSpec fields of DeepSeek-V3's routing; `normalised` and `dense`, the first dense layers, are defaults of the class."""
    config.note_unused(BALANCE_LOSS_NOTE, "router_aux_loss_coef")
    return {
        **shared_width(config, 1),
        "experts": config.integer("n_routed_experts", "num_local_experts", default=128),
        "experts_per_token": config.integer("num_experts_per_tok", default=8),
        "expert_hidden": config.integer("moe_intermediate_size", default=1408),
        "first_dense_layers": config.get("first_k_dense_replace", dense) or 0,
        "normalised_routing": config.flag("norm_topk_prob", normalised),
        "routing_scale": config.number("routed_scaling_factor", 1.0),
        "expert_groups": config.integer("n_group", default=1),
        "groups_per_token": config.integer("topk_group", default=1),
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        **share_keys(spec),
        "attention_bias": spec.qkv_bias,
        "use_qk_norm": spec.qk_norm,
        **routed_keys(spec, "GLM-4.5"),
        "num_nextn_predict_layers": spec.prediction_depth,
    }


def routed_keys(spec: ModelSpec, folder: str) -> dict[str, Any]:
    """The config.json keys of DeepSeek-V3's routing; raises BadInput if a `folder` cannot have the model's experts."""
    refuse_dense(spec, folder)
    return {
        "moe_intermediate_size": spec.expert_hidden,
        "n_routed_experts": spec.experts,
        "n_shared_experts": shared_count(spec, folder),
        "num_experts_per_tok": spec.experts_per_token,
        "first_k_dense_replace": spec.first_dense_layers,
        "n_group": spec.expert_groups,
        "topk_group": spec.groups_per_token,
        "routed_scaling_factor": spec.routing_scale,
        "norm_topk_prob": spec.normalised_routing,
        "output_router_logits": False,
    }


FAMILY = GLM4_MOE = replace(
    LLAMA,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    score_class=None,
    modules={
        **LLAMA.modules,
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
        **{ours: theirs for ours, theirs in DEEPSEEK_V3.modules.items() if ours.startswith("moe.")},
    },
    tensors=lambda spec: {"moe.choice_bias": "mlp.gate.e_score_correction_bias"},
    predictions=DEEPSEEK_V3.predictions,
    prediction_copies=DEEPSEEK_V3.prediction_copies,
    values={"router": "sigmoid"},
    required=(*EXPERTS, "shared_expert_hidden"),
    without_effect=frozenset(),
    from_config=_from_config,
    to_config=_to_config,
)
_RELEASED = {
    "kv_heads": 8,
    "head_dim": 128,
    "rope_width": 64,
    "rope_theta": 1_000_000.0,
    "vocab_size": 151552,
    "qkv_bias": True,
    "experts_per_token": 8,
}
PRESETS = {
    "glm4.5-air": Preset(
        model={
            **sizes(46, 4096, 96, 10944),
            **_RELEASED,
            "max_seq_len": 131072,
            "experts": 128,
            "expert_hidden": 1408,
            "shared_expert_hidden": 1408,
            "first_dense_layers": 1,
        },
        learning_rate=2.5e-4,
        seq_len=4096,
    ),
    "glm4.5": Preset(
        model={
            **sizes(92, 5120, 96, 12288),
            **_RELEASED,
            "qk_norm": True,
            "max_seq_len": 131072,
            "experts": 160,
            "expert_hidden": 1536,
            "shared_expert_hidden": 1536,
            "first_dense_layers": 3,
            "routing_scale": 2.5,
        },
        learning_rate=2.5e-4,
        seq_len=4096,
    ),
}
