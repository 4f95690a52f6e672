"""Llama: small random models, and published numbers of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import llama3, small, yarn

PARAMETERS = {
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}
WRONG = {
    "neighbours rotated": lambda spec: {"rope_pairs": "neighbours"},
    "no biases": lambda spec: {"bias": False} if spec.bias else {},
    "no scaling": lambda spec: {"rope_scaling": None, "yarn": None} if spec.rope_scaling or spec.yarn else {},
}


def config(draw: random.Random) -> dict[str, Any]:
    keys, bias = small(draw), draw.random() < 0.5
    scaled = draw.choice((None, llama3, yarn))
    rope = {"rope_parameters": scaled(draw)} if scaled else {}
    return {**keys, **rope, "attention_bias": bias, "mlp_bias": bias, "head_dim": draw.choice((6, 12))}


RELEASED = {
    "llama3-1b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    }
}
