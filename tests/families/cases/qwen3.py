"""Qwen3: small random models, and published numbers of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small, windowed

PARAMETERS = {"qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360}
CHANGED = {"max_window_layers"}
"""Without a window this key has no effect."""
WRONG = {
    "no norms of queries and keys": lambda spec: {"qk_norm": False},
    "a window of one token more": lambda spec: (
        {"sliding_window": spec.sliding_window + 1} if spec.sliding_window else {}
    ),
    "neighbours rotated": lambda spec: {"rope_pairs": "neighbours"},
}


def config(draw: random.Random) -> dict[str, Any]:
    return {**small(draw), **windowed(draw), "head_dim": draw.choice((6, 12))}


RELEASED = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
}
