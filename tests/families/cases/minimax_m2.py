"""MiniMax-M2: small random models, the published number of parameters, and mistakes that raise no error."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {"minimax-m2": 228_689_764_864}
"""The choice biases count; the released folder has 13,880,064 scales of fp8 blocks more."""
CHANGED = {"rotary_dim", "scoring_func", "use_routing_bias", "use_qk_norm", "qk_norm_type"}
"""An export has the keys of the released folder, which the class does not have."""
IN_MEMORY = (".mlp.", ".block_sparse_moe.")


def config(draw: random.Random) -> dict[str, Any]:
    keys = small(draw)
    return {
        **keys,
        "rope_parameters": {**keys["rope_parameters"], "partial_rotary_factor": draw.choice((0.5, 0.75))},
        "head_dim": draw.choice((8, 16)),
        "num_local_experts": draw.choice((4, 6)),
        "num_experts_per_tok": draw.choice((2, 3)),
    }


RELEASED = {
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attn_type_list": [1] * 62,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 1536,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "max_position_embeddings": 196608,
        "mlp_intermediate_size": 8192,
        "model_type": "minimax_m2",
        "mtp_transformer_layers": 1,
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    }
}
WRONG = {
    "norms of each head": lambda spec: {"qk_norm_whole": False} if spec.heads > 1 else {},
    "no norms of queries and keys": lambda spec: {"qk_norm": False, "qk_norm_whole": False},
    "whole heads rotated": lambda spec: {"rope_width": 0},
    "softmax scores": lambda spec: {"router": "softmax"},
    "weights not normalised": lambda spec: {"normalised_routing": False},
}
