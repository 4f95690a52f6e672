"""ERNIE 4.5 with experts: small random models, numbers of parameters, and mistakes that raise no error."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {"ernie4.5-21b-a3b": 21_825_437_888, "ernie4.5-300b-a47b": 299_484_163_264}
"""Of transformers' class with the keys below."""
WRONG = {
    "halves rotated": lambda spec: {"rope_pairs": "halves"},
    "scores are sigmoids": lambda spec: {"router": "sigmoid"},
    "experts chosen without the bias": lambda spec: {"router": "softmax"},
    "weights not normalised": lambda spec: {"normalised_routing": False},
    "no shared experts": lambda spec: {"shared_expert_hidden": 0} if spec.shared_expert_hidden else {},
}


def config(draw: random.Random) -> dict[str, Any]:
    keys, layers = small(draw), draw.choice((2, 3))
    return {
        **keys,
        "num_hidden_layers": layers,
        "pad_token_id": None,
        **draw.choice(({}, {"head_dim": 12})),
        "moe_num_experts": 8,
        "moe_k": draw.choice((2, 3)),
        "moe_intermediate_size": draw.choice((16, 24)),
        "moe_num_shared_experts": draw.choice((0, 1, 2)),
        "moe_layer_start_index": draw.choice((0, 1)),
        "moe_layer_end_index": draw.choice((-1, layers - 1)),
    }


def _released(**sizes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "model_type": "ernie4_5_moe",
        "moe_capacity": [64, 64, 64],
        "moe_gate": "topk",
        "moe_layer_interval": 1,
        "moe_num_experts": 64,
        "moe_use_aux_free": True,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000,
        "torch_dtype": "bfloat16",
        "use_bias": False,
        "use_cache": False,
        "vocab_size": 103424,
        **sizes,
    }


RELEASED = {
    "ernie4.5-21b-a3b": _released(
        hidden_size=2560,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        moe_k=6,
        moe_layer_end_index=27,
        moe_layer_start_index=1,
        moe_num_shared_experts=2,
        num_attention_heads=20,
        num_hidden_layers=28,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    ),
    "ernie4.5-300b-a47b": _released(
        hidden_size=8192,
        intermediate_size=28672,
        moe_intermediate_size=3584,
        moe_k=8,
        moe_layer_end_index=53,
        moe_layer_start_index=3,
        moe_num_shared_experts=0,
        num_attention_heads=64,
        num_hidden_layers=54,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
}
