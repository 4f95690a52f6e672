"""OLMo 2: small random models, and the published numbers of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
}
WRONG = {
    "norms of single heads": lambda spec: {"qk_norm_whole": False},
    "no norms of queries and keys": lambda spec: {"qk_norm": False, "qk_norm_whole": False},
    "norms of inputs too": lambda spec: {"input_norms": True},
}


def config(draw: random.Random) -> dict[str, Any]:
    keys = small(draw)
    return {**keys, **two_heads(keys), "pad_token_id": None}


def two_heads(keys: dict[str, Any]) -> dict[str, Any]:
    """With one head a norm of all heads is that of a single one."""
    heads = keys["num_attention_heads"]
    return {} if heads > 1 else {"num_attention_heads": 2, "hidden_size": 2 * keys["hidden_size"]}


RELEASED = {
    "olmo2-7b": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-06,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "architectures": ["Olmo2ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "olmo2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rope_scaling": None,
        "vocab_size": 100352,
    }
}
