"""Granite 3 MoE (IBM 2024): the factors of Granite, and experts in all layers.

The presets are models of version 3.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Key, presets, size
from meshwright.families.granite import RELEASED
from meshwright.families.keys import decoder, experts, factors
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_EXPERTS = experts.keys(Key("num_local_experts", 8), 2, Key("intermediate_size"))


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = decoder.read(config)
    bias = config.flag("attention_bias", False)
    fields |= {**factors.read(config, fields["head_dim"]), "qkv_bias": bias, "out_bias": bias}
    return {**fields, **experts.read(config, _EXPERTS)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    keys = {**decoder.shortened(decoder.write(spec), spec), **experts.write(spec, _EXPERTS, "Granite MoE")}
    return {**keys, **factors.write(spec), "attention_bias": spec.qkv_bias}


FAMILY = GRANITEMOE = replace(
    LLAMA,
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    score_class=None,
    modules={
        **experts.without_dense(LLAMA.modules),
        "moe.router": ("block_sparse_moe.router.layer",),
        "moe.experts.gate_up": ("block_sparse_moe.input_linear.weight",),
        "moe.experts.down": ("block_sparse_moe.output_linear.weight",),
    },
    required=experts.REQUIRED,
    from_config=_from_config,
    to_config=_to_config,
)
_EIGHT = {"experts_per_token": 8, "expert_hidden": 512, "head_dim": 64, "score_scale": 1 / 64, "logit_factor": 1 / 6}
PRESETS = presets(
    {
        "granite3.1-1b-a400m": size(24, 1024, 16, 8, 512, 6e-4, experts=32),
        "granite3.1-3b-a800m": size(32, 1536, 24, 8, 512, 4e-4, experts=40),
    },
    seq_len=4096,
    vocab_size=49155,
    max_seq_len=131072,
    rope_theta=1_500_000.0,
    norm_eps=1e-6,
    **_EIGHT,
    **RELEASED,
)
RELEASES = ("granite-3.1-1b-a400m-instruct", "granite-3.1-3b-a800m-instruct")
