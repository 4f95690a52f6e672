"""GLM-4.7-Flash (GLM Team 2026): DeepSeek-V3 with wider values, and experts in one group.

The preset has the dimensions of the released config file. Its learning rate was not published: it is that of other models of like size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.deepseek_v2 import shared_config, shared_fields, shared_width
from meshwright.families.deepseek_v3 import DEEPSEEK_V3
from meshwright.families.format import HFConfig, Preset, sizes
from meshwright.spec.model import ModelSpec

_DENSE, _ROUTED = "dense", "sparse"


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    config.expect("rope_interleave", True)
    fields, first = shared_fields(config), config.get("first_k_dense_replace", 1) or 0
    usual = [_DENSE] * first + [_ROUTED] * (fields["layers"] - first)
    types = config.get("mlp_layer_types") or usual
    if (
        not isinstance(types, list)
        or len(types) != len(usual)
        or types != sorted(types)
        or {*types} - {_DENSE, _ROUTED}
    ):
        raise config.error("mlp_layer_types", types, f"as many as layers, {_DENSE} before {_ROUTED}")
    if "first_k_dense_replace" in config.values and types != usual:
        raise config.error("mlp_layer_types", types, f"{first} times {_DENSE} first, as first_k_dense_replace says")
    return {
        **fields,
        **shared_width(config, 1),
        "norm_eps": config.number("rms_norm_eps", 1e-5),
        "first_dense_layers": types.count(_DENSE),
        "normalised_routing": config.flag("norm_topk_prob", True),
        "routing_scale": config.number("routed_scaling_factor", 1.8),
        "expert_groups": config.integer("n_group", default=1),
        "groups_per_token": config.integer("topk_group", default=1),
        "prediction_depth": config.get("num_nextn_predict_layers") or 0,
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    dense = spec.first_dense_layers
    return {
        **shared_config(spec),
        "rope_interleave": True,
        "mlp_layer_types": [_DENSE] * dense + [_ROUTED] * (spec.layers - dense),
        "num_nextn_predict_layers": spec.prediction_depth,
    }


FAMILY = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    score_class=None,
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = {
    "glm4.7-flash": Preset(
        model={
            **sizes(47, 2048, 20, 10240),
            "kv_heads": 20,
            "head_dim": 256,
            "kv_rank": 512,
            "q_rank": 768,
            "rope_head_dim": 64,
            "value_head_dim": 256,
            "vocab_size": 154880,
            "max_seq_len": 202752,
            "rope_theta": 1_000_000.0,
            "norm_eps": 1e-5,
            "experts": 64,
            "experts_per_token": 4,
            "expert_hidden": 1536,
            "shared_expert_hidden": 1536,
            "first_dense_layers": 1,
            "routing_scale": 1.8,
        },
        learning_rate=3e-4,
        seq_len=4096,
    )
}
