"""MiniMax-M2 (MiniMax 2025): experts chosen by sigmoid and bias, a part of each head rotated, norms of all heads together.

The preset has the dimensions of the released config file. Its learning rate was not published: it is that of other models of like size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, read_share, sizes
from meshwright.families.glm4 import share_keys
from meshwright.families.llama import gated_decoder_fields
from meshwright.families.mixtral import BALANCE_LOSS_NOTE, MIXTRAL, refuse_dense
from meshwright.spec.model import ModelSpec

_ONLY = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
"""Keys of the released folder that the class does not read, with the values that it has built in."""


def _from_config(config: HFConfig) -> dict[str, Any]:
    for key, value in _ONLY.items():
        config.expect(key, value)
    config.expect("router_jitter_noise", 0, 0.0)
    config.expect("attn_type_list", [1] * config.integer("num_hidden_layers", default=62))
    config.expect("shared_intermediate_size", 0)
    config.note_unused(BALANCE_LOSS_NOTE, "router_aux_loss_coef")
    fields = gated_decoder_fields(config, base=5_000_000.0, without_effect=frozenset({"partial_rotary_factor"}))
    head_dim = config.integer("head_dim", default=128)
    width = config.integer("rotary_dim", default=head_dim)
    return {
        **fields,
        **read_share(config, head_dim, width / head_dim),
        "head_dim": head_dim,
        "experts": config.integer("num_local_experts", "num_experts", default=256),
        "experts_per_token": config.integer("num_experts_per_tok", default=8),
        "expert_hidden": config.integer("intermediate_size", default=1536),
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    refuse_dense(spec, "MiniMax-M2")
    return {
        **share_keys(spec),
        **_ONLY,
        "rotary_dim": spec.rotary_dim,
        "intermediate_size": spec.expert_hidden,
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "output_router_logits": False,
    }


FAMILY = replace(
    MIXTRAL,
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    score_class=None,
    modules={
        **MIXTRAL.modules,
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
    },
    tensors=lambda spec: {"moe.choice_bias": "block_sparse_moe.e_score_correction_bias"},
    values={"router": "sigmoid", "qk_norm": True, "qk_norm_whole": True},
    # Of modules that predict further tokens, whose weights the folder does not have, and of other models of the class's author.
    without_effect=frozenset(
        {
            "layernorm_full_attention_beta",
            "layernorm_linear_attention_beta",
            "layernorm_mlp_beta",
            "max_model_len",
            "mlp_intermediate_size",
            "mtp_transformer_layers",
            "num_mtp_modules",
            "use_mtp",
        }
    ),
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = {
    "minimax-m2": Preset(
        model={
            **sizes(62, 3072, 48, 1536),
            "kv_heads": 8,
            "head_dim": 128,
            "rope_width": 64,
            "rope_theta": 5_000_000.0,
            "norm_eps": 1e-6,
            "vocab_size": 200064,
            "max_seq_len": 196608,
            "experts": 256,
            "experts_per_token": 8,
            "expert_hidden": 1536,
        },
        learning_rate=2e-4,
        seq_len=4096,
    )
}
