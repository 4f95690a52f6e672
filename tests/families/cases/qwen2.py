"""Qwen2 and Qwen2.5: small random models, and published numbers of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small, windowed

PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
}
CHANGED = {"max_window_layers"}
"""Without a window this key has no effect."""
WRONG = {
    "no biases": lambda spec: {"qkv_bias": False},
    "a window of one token more": lambda spec: (
        {"sliding_window": spec.sliding_window + 1} if spec.sliding_window else {}
    ),
    "neighbours rotated": lambda spec: {"rope_pairs": "neighbours"},
}


def config(draw: random.Random) -> dict[str, Any]:
    return {**small(draw), **windowed(draw)}


RELEASED = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
}
