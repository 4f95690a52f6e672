"""Seed-OSS: small random models, and the published number of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {"seed-oss-36b": 36_151_104_512}
WRONG = {
    "no biases": lambda spec: {"qkv_bias": False} if spec.qkv_bias else {},
}


def config(draw: random.Random) -> dict[str, Any]:
    bias = draw.random() < 0.8
    dropout = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    return {**small(draw), **dropout, "pad_token_id": None, "attention_bias": bias, "head_dim": draw.choice((6, 12))}


RELEASED = {
    "seed-oss-36b": {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_out_bias": False,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "max_position_embeddings": 524288,
        "mlp_bias": False,
        "model_type": "seed_oss",
        "num_attention_heads": 80,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "residual_dropout": 0.1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 155136,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
}
