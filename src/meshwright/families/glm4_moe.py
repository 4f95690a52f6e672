"""GLM-4.5 to 4.7 (GLM Team 2025, arXiv 2508.06471): the routing of DeepSeek-V3 with ordinary attention.

RoPE rotates half of each head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.deepseek_v3 import DEEPSEEK_V3
from meshwright.families.format import ConfigKeys, HFConfig, Key, presets, size
from meshwright.families.keys import decoder, experts
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_KEYS = ConfigKeys(
    {"qkv_bias": Key("attention_bias", False), "qk_norm": Key("use_qk_norm", False), **experts.PREDICTIONS}
)
_ROUTED = experts.routed(normalised=True, dense=1)


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = decoder.read(config, norm_eps=1e-5, share=0.5)
    return {**fields, **_KEYS.read(config), **experts.read_routed(config, _ROUTED)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**decoder.write(spec, share=True), **_KEYS.write(spec), **experts.write_routed(spec, _ROUTED, "GLM-4.5")}


FAMILY = GLM4_MOE = replace(
    LLAMA,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    score_class=None,
    modules={**LLAMA.modules, **decoder.HEAD_NORMS, **experts.MODULES, **experts.SHARED_MODULES},
    tensors=lambda spec: {"moe.choice_bias": "mlp.gate.e_score_correction_bias"},
    predictions=DEEPSEEK_V3.predictions,
    prediction_copies=DEEPSEEK_V3.prediction_copies,
    values={"router": "sigmoid"},
    required=(*experts.REQUIRED, "shared_expert_hidden"),
    without_effect=frozenset(),
    from_config=_from_config,
    to_config=_to_config,
)
_AIR = {"experts": 128, "expert_hidden": 1408, "shared_expert_hidden": 1408, "first_dense_layers": 1}
_FULL = {"experts": 160, "expert_hidden": 1536, "shared_expert_hidden": 1536, "first_dense_layers": 3}
PRESETS = presets(
    {
        "glm4.5-air": size(46, 4096, 96, 8, 10944, 2.5e-4, **_AIR),
        "glm4.5": size(92, 5120, 96, 8, 12288, 2.5e-4, **_FULL, qk_norm=True, routing_scale=2.5),
    },
    seq_len=4096,
    head_dim=128,
    rope_width=64,
    rope_theta=1_000_000.0,
    vocab_size=151552,
    max_seq_len=131072,
    qkv_bias=True,
    experts_per_token=8,
)
RELEASES = ("GLM-4.5-Air", "GLM-4.5", "GLM-4.6", "GLM-4.7")
