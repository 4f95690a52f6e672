"""OLMoE (Muennighoff et al.

2024, arXiv 2409.02060): experts in all layers, and one norm over all query heads and one over all key heads.

The learning rate of the preset is the paper's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import ConfigKeys, HFConfig, Key, presets, size
from meshwright.families.keys import experts
from meshwright.families.olmo2 import OLMO2
from meshwright.families.qwen3_moe import QWEN3_MOE
from meshwright.spec.model import ModelSpec


def routed(experts_of_class: int, per_token: int) -> ConfigKeys:
    """Return the keys of a model with experts in all layers. `experts_of_class` and `per_token` are defaults of the class."""
    number = Key("num_experts", experts_of_class, "num_local_experts")
    return experts.keys(number, per_token, Key("intermediate_size"), normalised_routing=Key("norm_topk_prob", False))


_EXPERTS = routed(64, 8)


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = {**OLMO2.from_config(config), **experts.read(config, _EXPERTS)}
    return {**fields, "norm_eps": config.number("rms_norm_eps", 1e-5)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**OLMO2.to_config(spec), **experts.write(spec, _EXPERTS, "OLMo")}


FAMILY = OLMOE = replace(
    QWEN3_MOE,
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    score_class=None,
    modules=experts.without_dense(QWEN3_MOE.modules),
    values={"qk_norm": True, "qk_norm_whole": True, "normalised_routing": False},
    without_effect=frozenset(),
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {"olmoe-1b-7b": size(16, 2048, 16, 16, 1024, 4e-4, experts=64, experts_per_token=8, expert_hidden=1024)},
    seq_len=4096,
    head_dim=128,
    vocab_size=50304,
    max_seq_len=4096,
    norm_eps=1e-5,
)
RELEASES = ("OLMoE-1B-7B-0924-Instruct",)
