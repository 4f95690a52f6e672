"""GLM-4.5: small random models, published numbers of parameters, and mistakes that raise no error."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {"glm4.5-air": 106_852_251_264, "glm4.5": 352_797_829_024}
"""Without the module that predicts a further token; the choice biases count."""


def config(draw: random.Random) -> dict[str, Any]:
    keys, groups = small(draw), draw.choice((1, 2))
    return {
        **keys,
        "rope_parameters": {**keys["rope_parameters"], "partial_rotary_factor": draw.choice((0.5, 0.75))},
        "pad_token_id": None,
        "head_dim": draw.choice((8, 16)),
        "attention_bias": draw.random() < 0.7,
        "use_qk_norm": draw.random() < 0.5,
        "moe_intermediate_size": draw.choice((16, 24)),
        "n_routed_experts": 8,
        "num_experts_per_tok": draw.choice((2, 3)),
        "n_shared_experts": draw.choice((1, 2)),
        "first_k_dense_replace": draw.choice((0, 1)),
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "n_group": 2 * groups,
        "topk_group": groups,
        "norm_topk_prob": draw.random() < 0.7,
        "num_mtp_layers": 0,
    }


RELEASED = {
    "glm4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338],
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0",
        "use_cache": True,
        "use_qk_norm": False,
        "vocab_size": 151552,
    }
}
"""Without `num_nextn_predict_layers`, so that it equals the preset."""
WRONG = {
    "neighbours rotated": lambda spec: {"rope_pairs": "neighbours"},
    "whole heads rotated": lambda spec: {"rope_width": 0},
    "no biases": lambda spec: {"qkv_bias": False} if spec.qkv_bias else {},
    "no norms of queries and keys": lambda spec: {"qk_norm": False} if spec.qk_norm else {},
    "softmax scores": lambda spec: {"router": "softmax"},
    "weights not scaled": lambda spec: {"routing_scale": 3.0},
    "no shared expert": lambda spec: {"shared_expert_hidden": 0},
}
