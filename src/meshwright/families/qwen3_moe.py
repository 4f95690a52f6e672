"""Qwen3-MoE (Yang et al. 2025): Qwen3 with MoE feed-forward networks.

The first layers may be dense. A sliding window applies to all layers. Unlike Qwen3, its config.json has no list of
layer types.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Key, presets, size
from meshwright.families.keys import decoder, experts
from meshwright.families.qwen3 import QWEN3, RELEASED
from meshwright.spec.model import ModelSpec

_EXPERTS = experts.keys(
    Key("num_experts", other="num_local_experts"),
    8,
    Key("moe_intermediate_size", 768),
    normalised_routing=Key("norm_topk_prob", False),
)


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("decoder_sparse_step", 1)
    config.expect("attention_bias", False)
    fields = {**decoder.read(config), **experts.read(config, _EXPERTS)}
    windowed = config.flag("use_sliding_window", False)
    return {
        **fields,
        "sliding_window": config.integer("sliding_window", default=4096) if windowed else None,
        "first_dense_layers": experts.read_dense_layers(config, fields["layers"]),
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    windowed = {"use_sliding_window": spec.sliding_window is not None, "sliding_window": spec.sliding_window}
    keys = {**decoder.write(spec), "attention_bias": False, **windowed, **experts.write(spec, _EXPERTS, "Qwen3-MoE")}
    return {**keys, **experts.write_dense_layers(spec)}


FAMILY = QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    modules={**QWEN3.modules, **experts.MODULES},
    required=experts.REQUIRED,
    without_effect=frozenset({"max_window_layers", "sliding_window"}),
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {
        "qwen3-30b-a3b": size(48, 2048, 32, 4, 6144, 3e-4, expert_hidden=768),
        "qwen3-235b-a22b": size(94, 4096, 64, 4, 12288, 1.5e-4, expert_hidden=1536),
    },
    experts=128,
    experts_per_token=8,
    **RELEASED,
)
RELEASES = ("Qwen3-30B-A3B", "Qwen3-235B-A22B")
