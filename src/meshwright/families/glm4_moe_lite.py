"""GLM-4.7-Flash (GLM Team 2026): DeepSeek-V3 with wider values, and with all experts in one group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.deepseek_v3 import CHOICE, DEEPSEEK_V3, KEYS
from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import experts, latent
from meshwright.spec.model import ModelSpec

_DENSE = "dense"
_ROUTED = "sparse"
_DEFAULTS = {"routed_scaling_factor": 1.8, "first_k_dense_replace": 1}


def _from_config(config: HFConfig) -> dict[str, Any]:
    stated = "first_k_dense_replace" in config.values
    config = replace(config, values={**_DEFAULTS, **config.values})
    CHOICE.read(config)
    fields = {**latent.read(config, norm_eps=1e-5), **KEYS.read(config)}
    first = fields["first_dense_layers"]
    layers = fields["layers"]
    usual = [_DENSE] * first + [_ROUTED] * (layers - first)
    types = config.get("mlp_layer_types") or usual
    if not isinstance(types, list) or len(types) != layers or types != sorted(types) or {*types} - {_DENSE, _ROUTED}:
        raise config.error("mlp_layer_types", types, f"as many as layers, {_DENSE} before {_ROUTED}")
    if stated and types != usual:
        raise config.error("mlp_layer_types", types, f"{first} times {_DENSE} first, as first_k_dense_replace says")
    fields |= experts.read_shared(config, fields["expert_hidden"])
    return {**fields, "first_dense_layers": types.count(_DENSE)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    types = [_DENSE] * spec.first_dense_layers + [_ROUTED] * (spec.layers - spec.first_dense_layers)
    return {**latent.write(spec), **KEYS.write(spec), "mlp_layer_types": types}


FAMILY = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    score_class=None,
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {"glm4.7-flash": size(47, 2048, 20, 20, 10240, 3e-4, head_dim=256, q_rank=768, value_head_dim=256)},
    seq_len=4096,
    kv_rank=512,
    rope_head_dim=64,
    vocab_size=154880,
    max_seq_len=202752,
    rope_theta=1_000_000.0,
    norm_eps=1e-5,
    experts=64,
    experts_per_token=4,
    expert_hidden=1536,
    shared_expert_hidden=1536,
    first_dense_layers=1,
    routing_scale=1.8,
)
RELEASES = ("GLM-4.7-Flash",)
