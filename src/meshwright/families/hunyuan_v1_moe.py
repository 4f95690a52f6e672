"""Hunyuan with experts (Hunyuan-A13B, Tencent 2025): Hunyuan's attention, experts in all layers, and a shared expert of the same width.

The preset has the dimensions of the released config file. Its learning rate was not published: it is that of other models of like size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes
from meshwright.families.hunyuan_v1_dense import HUNYUAN, RELEASED, decoder_fields, stretched
from meshwright.families.mixtral import EXPERTS, refuse_dense
from meshwright.families.qwen3_moe import QWEN3_MOE
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    for key, value in {"use_mixed_mlp_moe": True, "norm_topk_prob": True, "moe_layer_num_skipped": 0}.items():
        config.expect(key, value)
    fields = decoder_fields(config)
    width = _same(config, "moe_intermediate_size", fields["layers"], fields["ffn_hidden"])
    config.expect("num_shared_expert", 1, [1] * fields["layers"])
    if width != fields["ffn_hidden"]:
        raise config.error(
            "moe_intermediate_size", width, f"intermediate_size ({fields['ffn_hidden']}), as in the class"
        )
    return {
        **fields,
        "experts": _same(config, "num_experts", fields["layers"], 1),
        "experts_per_token": _same(config, "moe_topk", fields["layers"], 1),
        "expert_hidden": width,
        "shared_expert_hidden": width,
    }


def _same(config: HFConfig, key: str, layers: int, default: int) -> int:
    """A count that all layers have: one number, or a list with an equal one for each layer."""
    listed = config.get(key)
    if isinstance(listed, list):
        if len(listed) < layers or len(set(listed)) != 1:
            raise config.error(key, listed, f"a number, or a list of {layers} equal ones")
        config = HFConfig({key: listed[0]}, config.where)
    return config.integer(key, default=default)


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    refuse_dense(spec, "Hunyuan MoE")
    if spec.shared_expert_hidden != spec.expert_hidden:
        expected = f"{spec.expert_hidden}, the width of an expert, in a Hunyuan MoE folder"
        raise BadInput(f"model.shared_expert_hidden: expected {expected}, got {spec.shared_expert_hidden}")
    config = {**HUNYUAN.to_config(spec), "intermediate_size": spec.expert_hidden}
    return {**config, "num_experts": spec.experts, "moe_topk": spec.experts_per_token, "output_router_logits": False}


_ROUTED = {ours: theirs for ours, theirs in QWEN3_MOE.modules.items() if ours.startswith("moe.experts")}
_ATTENTION = {ours: theirs for ours, theirs in HUNYUAN.modules.items() if not ours.startswith("mlp.")}
FAMILY = replace(
    HUNYUAN,
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    modules={
        **_ATTENTION,
        **_ROUTED,
        "moe.router": ("mlp.gate.wg",),
        "moe.shared.gate_up": ("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        "moe.shared.down": ("mlp.shared_mlp.down_proj",),
    },
    required=(*EXPERTS, "shared_expert_hidden"),
    from_config=_from_config,
    to_config=_to_config,
)
_A13B = {"experts": 64, "experts_per_token": 8, "expert_hidden": 3072, "shared_expert_hidden": 3072}
_SIZES = {**sizes(32, 4096, 32, 3072), **RELEASED, "vocab_size": 128167, "norm_eps": 1e-5}
PRESETS = {
    "hunyuan-a13b": Preset(
        model={**_SIZES, **_A13B, "rope_theta": stretched(10000.0, 1000.0, 128)}, learning_rate=2e-4, seq_len=4096
    )
}
