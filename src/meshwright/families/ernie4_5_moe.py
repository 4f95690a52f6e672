"""ERNIE 4.5 with experts (Baidu 2025): experts are chosen by softmax plus a bias, and weighted without the bias.

Released folders have a module that predicts a further token. It has a form of its own, and is not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.ernie4_5 import ERNIE4_5, RELEASED
from meshwright.families.format import ConfigKeys, HFConfig, Key, presets, size
from meshwright.families.keys import decoder, experts
from meshwright.spec.model import ModelSpec

_EXPERTS = ConfigKeys(
    {
        "experts": Key("moe_num_experts", 64, "num_experts"),
        "experts_per_token": Key("moe_k", 6, "num_experts_per_tok"),
        "expert_hidden": Key("moe_intermediate_size", 1536),
        "first_dense_layers": Key("moe_layer_start_index", 1, least=0),
    },
    # With a bias, the head would have one too.
    fixed={"moe_layer_interval": 1, "moe_norm_min": 1e-12, "use_bias": False},
)
_SHARED = "moe_num_shared_experts"


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = {**decoder.read(config, norm_eps=1e-5, base=500_000.0), **experts.read(config, _EXPERTS)}
    config.expect("moe_layer_end_index", -1, fields["layers"] - 1)
    config.expect("moe_use_aux_free", True)
    config.note_unused("the decoder has no module of this form", "num_nextn_predict_layers")
    return {**fields, **experts.read_shared(config, fields["expert_hidden"], 2, _SHARED, least=0)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    keys = decoder.shortened(ERNIE4_5.to_config(spec), spec)
    routed = {**experts.write(spec, _EXPERTS, "ERNIE 4.5"), **experts.write_shared(spec, "ERNIE 4.5", _SHARED, least=0)}
    return {**keys, **routed, "moe_layer_end_index": spec.layers - 1}


FAMILY = replace(
    ERNIE4_5,
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    modules={**ERNIE4_5.modules, **experts.MODULES, **experts.SHARED_MODULES},
    tensors=lambda spec: {"moe.choice_bias": "mlp.moe_statics.e_score_correction_bias"},
    one_row=frozenset({"moe.choice_bias"}),
    unread=("model.mtp_",),
    values={**ERNIE4_5.values, "router": "biased_softmax"},
    required=experts.REQUIRED,
    without_effect=frozenset({"moe_capacity", "moe_gate"}),
    from_config=_from_config,
    to_config=_to_config,
)
_SMALL = {"experts_per_token": 6, "expert_hidden": 1536, "shared_expert_hidden": 3072, "first_dense_layers": 1}
_LARGE = {"experts_per_token": 8, "expert_hidden": 3584, "first_dense_layers": 3, "tied": False}
_SIZES = {
    "ernie4.5-21b-a3b": size(28, 2560, 20, 4, 12288, 3e-4, **_SMALL),
    "ernie4.5-300b-a47b": size(54, 8192, 64, 8, 28672, 1.5e-4, **_LARGE),
}
PRESETS = presets(_SIZES, experts=64, **RELEASED)
RELEASES = ("ERNIE-4.5-21B-A3B-PT", "ERNIE-4.5-300B-A47B-PT")
