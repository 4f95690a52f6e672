"""Qwen3-MoE (Yang et al. 2025): Qwen3 with a mixture of experts in its layers. Presets are as released.

The first layers may be dense. A sliding window applies to all layers; unlike Qwen3's, its config has no list of layer types.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes
from meshwright.families.llama import gated_decoder_config, gated_decoder_fields
from meshwright.families.mixtral import BALANCE_LOSS_NOTE, EXPERTS, refuse_dense
from meshwright.families.qwen3 import QWEN3, RELEASED
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("decoder_sparse_step", 1)
    config.note_unused(BALANCE_LOSS_NOTE, "router_aux_loss_coef")
    config.expect("attention_bias", False)
    windowed = config.flag("use_sliding_window", False)
    return {
        **gated_decoder_fields(config),
        "sliding_window": config.integer("sliding_window", default=4096) if windowed else None,
        "experts": config.integer("num_experts", "num_local_experts"),
        "experts_per_token": config.integer("num_experts_per_tok", default=8),
        "expert_hidden": config.integer("moe_intermediate_size", default=768),
        "first_dense_layers": _dense_layers(config),
        "normalised_routing": config.flag("norm_topk_prob", False),
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    refuse_dense(spec, "Qwen3-MoE")
    return {
        **gated_decoder_config(spec),
        "attention_bias": False,
        "use_sliding_window": spec.sliding_window is not None,
        "sliding_window": spec.sliding_window,
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.expert_hidden,
        "norm_topk_prob": spec.normalised_routing,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(spec.first_dense_layers)),
        "output_router_logits": False,
    }


def _dense_layers(config: HFConfig) -> int:
    """The number of first layers without experts; raises BadInput if other layers have none."""
    dense = config.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        raise config.error(
            "mlp_only_layers",
            dense,
            "the first layers: in this decoder dense layers come first",
        )
    return len(dense)


_RELEASED = {**RELEASED, "kv_heads": 4, "experts": 128, "experts_per_token": 8}

FAMILY = QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    modules={
        **QWEN3.modules,
        "moe.router": ("mlp.gate",),
        "moe.experts.gate_up": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
        "moe.experts.down": ("mlp.experts.{expert}.down_proj",),
    },
    required=EXPERTS,
    without_effect=frozenset({"max_window_layers", "sliding_window"}),
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = {
    "qwen3-30b-a3b": Preset(
        model=_RELEASED | sizes(48, 2048, 32, 6144) | {"expert_hidden": 768}, learning_rate=3e-4, seq_len=8192
    ),
    "qwen3-235b-a22b": Preset(
        model=_RELEASED | sizes(94, 4096, 64, 12288) | {"expert_hidden": 1536}, learning_rate=1.5e-4, seq_len=8192
    ),
}
