"""Mistral: small random models, and the published numbers of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {"mistral-7b": 7_241_732_096, "mistral-nemo-12b": 12_247_782_400, "mistral-small-24b": 23_572_403_200}
WRONG = {
    "a window of one token more": lambda spec: {"sliding_window": (spec.sliding_window or 9) + 1},
    "no window": lambda spec: {"sliding_window": None if spec.sliding_window else 9},
}


def config(draw: random.Random) -> dict[str, Any]:
    return {**small(draw), "sliding_window": draw.choice((None, 7, 16)), "head_dim": draw.choice((6, 12))}


RELEASED = {
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    }
}
