"""GLM-4-0414: small random models, and the published numbers of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {"glm4-9b": 9_400_279_040, "glm4-32b": 33_141_749_760}
WRONG = {
    "halves rotated": lambda spec: {"rope_pairs": "halves"},
    "whole heads rotated": lambda spec: {"rope_width": 0},
    "no biases": lambda spec: {"qkv_bias": False} if spec.qkv_bias else {},
    "no norms of outputs": lambda spec: {"output_norms": False},
}


def config(draw: random.Random) -> dict[str, Any]:
    keys = small(draw)
    share = draw.choice((0.5, 0.75))
    return {
        **keys,
        "rope_parameters": {**keys["rope_parameters"], "partial_rotary_factor": share},
        "head_dim": draw.choice((8, 16)),
        "attention_bias": draw.random() < 0.7,
        "pad_token_id": None,
    }


RELEASED = {
    "glm4-9b": {
        "architectures": ["Glm4ForCausalLM"],
        "attention_dropout": 0.0,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "model_type": "glm4",
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151552,
        "eos_token_id": [151329, 151336, 151338],
        "pad_token_id": 151329,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "attention_bias": True,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
    },
    "glm4-32b": {
        "architectures": ["Glm4ForCausalLM"],
        "attention_dropout": 0.0,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "model_type": "glm4",
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151552,
        "eos_token_id": [151329, 151336, 151338],
        "pad_token_id": 151329,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "attention_bias": False,
        "hidden_size": 6144,
        "intermediate_size": 23040,
        "num_attention_heads": 48,
        "num_hidden_layers": 61,
        "num_key_value_heads": 8,
    },
}
