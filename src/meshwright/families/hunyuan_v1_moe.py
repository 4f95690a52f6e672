"""Hunyuan with experts (Hunyuan-A13B, Tencent 2025): the attention of Hunyuan, experts in all layers, and an equally wide shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import ConfigKeys, HFConfig, Key, presets, size
from meshwright.families.hunyuan_v1_dense import HUNYUAN, RELEASED
from meshwright.families.keys import experts, rope
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

_COUNTS = ConfigKeys({"experts": Key("num_experts", 1), "experts_per_token": Key("moe_topk", 1)})
_WIDTH = "moe_intermediate_size"
_LISTED = (_WIDTH, "num_experts", "moe_topk")  # These keys may have a list with one number for each layer.


def _from_config(config: HFConfig) -> dict[str, Any]:
    for key, value in {"use_mixed_mlp_moe": True, "norm_topk_prob": True, "moe_layer_num_skipped": 0}.items():
        config.expect(key, value)
    fields = HUNYUAN.from_config(config)
    config.expect("num_shared_expert", 1, [1] * fields["layers"])
    config = experts.one_for_all_layers(config, fields["layers"], *_LISTED)
    width = fields["ffn_hidden"]
    if (given := config.integer(_WIDTH, default=width)) != width:
        raise config.error(_WIDTH, given, f"intermediate_size ({width}), as in the class")
    return {**fields, **_COUNTS.read(config), "expert_hidden": width, "shared_expert_hidden": width}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    keys = {**HUNYUAN.to_config(spec), **experts.write(spec, _COUNTS, "Hunyuan MoE")}
    if spec.shared_expert_hidden != spec.expert_hidden:
        expected = f"{spec.expert_hidden}, the width of an expert, in a Hunyuan MoE folder"
        raise BadInput(f"model.shared_expert_hidden: expected {expected}, got {spec.shared_expert_hidden}")
    return {**keys, "intermediate_size": spec.expert_hidden}


FAMILY = replace(
    HUNYUAN,
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    modules={
        **experts.without_dense(HUNYUAN.modules),
        **experts.MODULES,
        "moe.router": ("mlp.gate.wg",),
        "moe.shared.gate_up": ("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        "moe.shared.down": ("mlp.shared_mlp.down_proj",),
    },
    required=(*experts.REQUIRED, "shared_expert_hidden"),
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {"hunyuan-a13b": size(32, 4096, 32, 8, 3072, 2e-4, experts=64, experts_per_token=8)},
    vocab_size=128167,
    rope_theta=rope.stretched_base(10000.0, 1000.0, 128),
    expert_hidden=3072,
    shared_expert_hidden=3072,
    **RELEASED,
)
RELEASES = ("Hunyuan-A13B-Instruct",)
