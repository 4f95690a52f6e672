"""MiniMax-M2 (MiniMax 2025): sigmoid routing with a bias, and RoPE on a part of each head.

One norm covers all query heads, and one all key heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import ConfigKeys, HFConfig, Key, presets, size
from meshwright.families.keys import decoder, experts
from meshwright.families.mixtral import MIXTRAL
from meshwright.spec.model import ModelSpec

_BUILT_IN = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
"""Keys of the released folder that the class does not read. The class behaves as if they had these values."""
_KEYS = ConfigKeys(fixed=_BUILT_IN)
_EXPERTS = experts.keys(Key("num_local_experts", 256, "num_experts"), 8, Key("intermediate_size"))


def _from_config(config: HFConfig) -> dict[str, Any]:
    _KEYS.read(config)
    config.expect("router_jitter_noise", 0, 0.0)
    config.expect("attn_type_list", [1] * config.integer("num_hidden_layers", default=62))
    config.expect("shared_intermediate_size", 0)
    head_dim = config.integer("head_dim", default=128)
    share = config.integer("rotary_dim", default=head_dim) / head_dim
    fields = decoder.read(config, head_dim=head_dim, share=share, base=5_000_000.0)
    return {**fields, **experts.read(config, _EXPERTS)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    keys = {**decoder.write(spec, share=True), **experts.write(spec, _EXPERTS, "MiniMax-M2")}
    return {**keys, **_KEYS.write(spec), "rotary_dim": spec.rotary_dim}


# Keys about modules that predict further tokens, whose weights the folder does not have, and keys of other models of
# the same author.
_UNUSED = {"mtp_transformer_layers", "num_mtp_modules", "use_mtp", "max_model_len", "mlp_intermediate_size"}
_UNUSED |= {f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")}
FAMILY = replace(
    MIXTRAL,
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    score_class=None,
    modules={**MIXTRAL.modules, **decoder.HEAD_NORMS},
    tensors=lambda spec: {"moe.choice_bias": "block_sparse_moe.e_score_correction_bias"},
    values={"router": "sigmoid", "qk_norm": True, "qk_norm_whole": True},
    without_effect=frozenset(_UNUSED),
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {"minimax-m2": size(62, 3072, 48, 8, 1536, 2e-4, experts=256, experts_per_token=8, expert_hidden=1536)},
    seq_len=4096,
    head_dim=128,
    rope_width=64,
    rope_theta=5_000_000.0,
    norm_eps=1e-6,
    vocab_size=200064,
    max_seq_len=196608,
)
RELEASES = ("MiniMax-M2",)
