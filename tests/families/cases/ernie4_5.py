"""ERNIE 4.5: small random models, and the published number of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {"ernie4.5-0.3b": 360_748_032}
WRONG = {
    "halves rotated": lambda spec: {"rope_pairs": "halves"},
    "half of each head rotated": lambda spec: {"rope_width": spec.head_dim // 2},
}


def config(draw: random.Random) -> dict[str, Any]:
    return {**small(draw), "pad_token_id": None, "use_bias": draw.random() < 0.4, "head_dim": draw.choice((8, 12))}


RELEASED = {
    "ernie4.5-0.3b": {
        "architectures": ["Ernie4_5ForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 131072,
        "model_type": "ernie4_5",
        "num_attention_heads": 16,
        "num_hidden_layers": 18,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_bias": False,
        "use_cache": False,
        "vocab_size": 103424,
    }
}
