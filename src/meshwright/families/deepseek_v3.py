"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437): V2 with sigmoid routing and modules that predict further tokens.

A bias, which balances the experts' loads, takes part in their choice. The preset is as released.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.deepseek_v2 import DEEPSEEK_V2, RELEASED, shared_config, shared_fields, shared_width
from meshwright.families.format import HFConfig, Preset, sizes
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    config.expect("rope_interleave", True)
    return {
        **shared_fields(config),
        **shared_width(config, 1),
        "normalised_routing": config.flag("norm_topk_prob", True),
        "routing_scale": config.number("routed_scaling_factor", 2.5),
        "expert_groups": config.integer("n_group", default=8),
        "groups_per_token": config.integer("topk_group", default=4),
        "prediction_depth": config.get("num_nextn_predict_layers") or 0,
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        **shared_config(spec),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
        "num_nextn_predict_layers": spec.prediction_depth,
    }


FAMILY = DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    tensors=lambda spec: {**DEEPSEEK_V2.tensors(spec), "moe.choice_bias": "mlp.gate.e_score_correction_bias"},
    predictions={"token_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"},
    prediction_copies={"embed": "embed_tokens", "head": "shared_head.head"},
    values={"router": "sigmoid"},
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = {
    "deepseek-v3": Preset(
        model={
            **RELEASED,
            **sizes(61, 7168, 128, 18432),
            "kv_heads": 128,
            "vocab_size": 129280,
            "experts": 256,
            "experts_per_token": 8,
            "expert_hidden": 2048,
            "shared_expert_hidden": 2048,
            "first_dense_layers": 3,
            "expert_groups": 8,
            "groups_per_token": 4,
            "routing_scale": 2.5,
            "yarn": {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        learning_rate=2.2e-4,
        seq_len=4096,
        train={"balance_loss": 1e-4},
    )
}
