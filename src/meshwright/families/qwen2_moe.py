"""Qwen2-MoE and Qwen1.5-MoE (Yang et al. 2024): Qwen2 with experts, and a shared expert times a gate of the token.

The presets are as released; their learning rates were not published: these are those of other models of like size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import (
    FULL,
    SLIDING,
    HFConfig,
    Preset,
    sizes,
    windowed_layers,
    written_layers,
)
from meshwright.families.gemma3_text import layer_types
from meshwright.families.llama import LLAMA, gated_decoder_config, gated_decoder_fields
from meshwright.families.mixtral import BALANCE_LOSS_NOTE, EXPERTS, refuse_dense
from meshwright.families.qwen3_moe import QWEN3_MOE
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.note_unused(BALANCE_LOSS_NOTE, "router_aux_loss_coef")
    config.read.add("head_dim")  # the class has no such key
    fields = gated_decoder_fields(replace(config, values={**config.values, "head_dim": None}))
    return {
        **fields,
        **_windows(config, fields["layers"]),
        "qkv_bias": config.flag("qkv_bias", True),
        "experts": config.integer("num_experts", "num_local_experts", default=60),
        "experts_per_token": config.integer("num_experts_per_tok", default=4),
        "expert_hidden": config.integer("moe_intermediate_size", default=1408),
        "shared_expert_hidden": config.integer("shared_expert_intermediate_size", default=5632),
        "first_dense_layers": _dense_layers(config, fields["layers"]),
        "normalised_routing": config.flag("norm_topk_prob", False),
    }


def _windows(config: HFConfig, layers: int) -> dict[str, Any]:
    """Without `layer_types` every other layer before `max_window_layers` has the window: not those that Qwen2 gives it."""
    windowed, last = config.flag("use_sliding_window", False), config.get("max_window_layers", 28)
    types = [SLIDING if windowed and layer % 2 == 0 and layer < last else FULL for layer in range(layers)]
    if windowed and config.get("layer_types") is not None:
        types = layer_types(config, layers, 1)
    config.read.update(("layer_types", "sliding_window"))
    return windowed_layers(types, config.integer("sliding_window", default=4096) if windowed else 0)


def _dense_layers(config: HFConfig, layers: int) -> int:
    """The number of first layers without experts; raises BadInput if other layers have none."""
    step, only = config.integer("decoder_sparse_step", default=1), config.get("mlp_only_layers") or []
    dense = [layer for layer in range(layers) if layer in only or (layer + 1) % step]
    if dense != list(range(len(dense))) or len(dense) == layers:
        key = "decoder_sparse_step" if step > 1 else "mlp_only_layers"
        raise config.error(key, config.get(key), "dense layers before those with experts, as in this decoder")
    return len(dense)


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    refuse_dense(spec, "Qwen2-MoE")
    if spec.head_dim * spec.heads != spec.hidden:
        raise BadInput(f"model.head_dim: a Qwen2-MoE folder needs hidden ÷ heads, got {spec.head_dim}")
    config = {**gated_decoder_config(spec), **written_layers(spec)}
    del config["head_dim"]
    return {
        **config,
        "use_sliding_window": config["sliding_window"] is not None,
        "max_window_layers": spec.layers,
        "qkv_bias": spec.qkv_bias,
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.expert_hidden,
        "shared_expert_intermediate_size": spec.shared_expert_hidden,
        "norm_topk_prob": spec.normalised_routing,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(spec.first_dense_layers)),
        "output_router_logits": False,
    }


FAMILY = replace(
    QWEN3_MOE,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    modules={
        **LLAMA.modules,
        **{ours: theirs for ours, theirs in QWEN3_MOE.modules.items() if ours.startswith("moe.")},
        "moe.shared.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "moe.shared.down": ("mlp.shared_expert.down_proj",),
        "moe.shared_gate": ("mlp.shared_expert_gate",),
    },
    values={"qkv_bias": True, "shared_expert_gate": True, "normalised_routing": False},
    required=(*EXPERTS, "shared_expert_hidden"),
    without_effect=frozenset(),
    from_config=_from_config,
    to_config=_to_config,
)


def _preset(size: dict[str, Any], learning_rate: float, **other: Any) -> Preset:
    model = {
        **size,
        "head_dim": 128,
        "vocab_size": 151936,
        "norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "experts_per_token": 4,
        **other,
    }
    return Preset(model=model, learning_rate=learning_rate, seq_len=4096)


PRESETS = {
    "qwen1.5-moe-a2.7b": _preset(
        sizes(24, 2048, 16, 5632),
        3e-4,
        kv_heads=16,
        max_seq_len=8192,
        experts=60,
        expert_hidden=1408,
        shared_expert_hidden=5632,
    ),
    "qwen2-57b-a14b": _preset(
        sizes(28, 3584, 28, 18944),
        3e-4,
        kv_heads=4,
        max_seq_len=131072,
        experts=64,
        experts_per_token=8,
        expert_hidden=2560,
        shared_expert_hidden=20480,
    ),
}
