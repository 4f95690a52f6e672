"""Qwen2-MoE and Qwen1.5-MoE (Yang et al.

2024): Qwen2 with experts, and with a shared expert whose output a gate scales for each token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Key, presets, size
from meshwright.families.keys import decoder, experts, layers
from meshwright.families.llama import LLAMA
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

_EXPERTS = experts.keys(
    Key("num_experts", 60, "num_local_experts"),
    4,
    Key("moe_intermediate_size", 1408),
    shared_expert_hidden=Key("shared_expert_intermediate_size", 5632),
    normalised_routing=Key("norm_topk_prob", False),
    qkv_bias=Key("qkv_bias", True),
)


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.read.add("head_dim")  # The class has no key `head_dim`.
    fields = decoder.read(config.without("head_dim"))
    dense = experts.read_dense_layers(config, fields["layers"])
    return {
        **fields,
        **experts.read(config, _EXPERTS),
        **layers.read_alternating(config, fields["layers"]),
        "first_dense_layers": dense,
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    routed = {**experts.write(spec, _EXPERTS, "Qwen2-MoE"), **experts.write_dense_layers(spec)}
    if spec.head_dim * spec.heads != spec.hidden:
        raise BadInput(f"model.head_dim: a Qwen2-MoE folder needs hidden ÷ heads, got {spec.head_dim}")
    return {**decoder.shortened(decoder.write(spec), spec), **layers.write_alternating(spec), **routed}


FAMILY = replace(
    LLAMA,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    modules={
        **LLAMA.modules,
        **experts.MODULES,
        "moe.shared.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "moe.shared.down": ("mlp.shared_expert.down_proj",),
        "moe.shared_gate": ("mlp.shared_expert_gate",),
    },
    values={"qkv_bias": True, "shared_expert_gate": True, "normalised_routing": False},
    required=(*experts.REQUIRED, "shared_expert_hidden"),
    without_effect=frozenset(),
    from_config=_from_config,
    to_config=_to_config,
)
_SMALL = {"experts": 60, "experts_per_token": 4, "expert_hidden": 1408, "shared_expert_hidden": 5632}
_LARGE = {"experts": 64, "experts_per_token": 8, "expert_hidden": 2560, "shared_expert_hidden": 20480}
PRESETS = presets(
    {
        "qwen1.5-moe-a2.7b": size(24, 2048, 16, 16, 5632, 3e-4, **_SMALL, max_seq_len=8192),
        "qwen2-57b-a14b": size(28, 3584, 28, 4, 18944, 3e-4, **_LARGE, max_seq_len=131072),
    },
    seq_len=4096,
    head_dim=128,
    vocab_size=151936,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
)
RELEASES = ("Qwen1.5-MoE-A2.7B", "Qwen2-57B-A14B-Instruct")
