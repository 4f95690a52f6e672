"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437):

DeepSeek-V2 with sigmoid routing and modules that predict further tokens.

A bias is added to the scores when experts are chosen, to balance the loads of the experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.deepseek_v2 import DEEPSEEK_V2, HEADS
from meshwright.families.format import ConfigKeys, HFConfig, presets, size
from meshwright.families.keys import experts, latent
from meshwright.spec.model import ModelSpec

KEYS = ConfigKeys({**experts.ROUTING, **experts.PREDICTIONS}, fixed={"rope_interleave": True})
"""Keys of routing and predictions, also for families that follow DeepSeek-V3."""
CHOICE = ConfigKeys(fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
"""Keys that name the method of routing. Only this method is read."""
_DEFAULTS = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
"""Defaults of the class in transformers that differ from those of later classes."""


def _from_config(config: HFConfig) -> dict[str, Any]:
    config = replace(config, values={**_DEFAULTS, **config.values})
    CHOICE.read(config)
    fields = latent.read(config)
    return {**fields, **experts.read_shared(config, fields["expert_hidden"]), **KEYS.read(config)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**latent.write(spec), **CHOICE.write(spec), **KEYS.write(spec)}


FAMILY = DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    tensors=lambda spec: {**DEEPSEEK_V2.tensors(spec), "moe.choice_bias": "mlp.gate.e_score_correction_bias"},
    predictions={"token_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"},
    prediction_copies={"embed": "embed_tokens", "head": "shared_head.head"},
    values={"router": "sigmoid"},
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {
        "deepseek-v3": size(
            *(61, 7168, 128, 128, 18432, 2.2e-4), expert_groups=8, groups_per_token=4, routing_scale=2.5, experts=256
        )
    },
    seq_len=4096,
    train={"balance_loss": 1e-4},
    vocab_size=129280,
    max_seq_len=163840,
    experts_per_token=8,
    expert_hidden=2048,
    shared_expert_hidden=2048,
    first_dense_layers=3,
    yarn={"mscale": 1.0, "mscale_all_dim": 1.0},
    **HEADS,
)
RELEASES = ("DeepSeek-V3", "DeepSeek-V3.1", "DeepSeek-R1")
