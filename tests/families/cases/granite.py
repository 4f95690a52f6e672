"""Granite: small random models, and the published numbers of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {"granite3.3-2b": 2_533_539_840, "granite3.3-8b": 8_170_864_640}
WRONG = {
    "embeddings without their factor": lambda spec: {"embedding_scale": 1.0},
    "outputs without their factor": lambda spec: {"residual_factor": 1.0},
    "logits without their factor": lambda spec: {"logit_factor": 1.0},
    "logits multiplied by the divisor": lambda spec: {"logit_factor": 1 / spec.logit_factor},
    "the usual factor of scores": lambda spec: {"score_scale": None},
}


def config(draw: random.Random) -> dict[str, Any]:
    bias = draw.random() < 0.3
    return {
        **small(draw),
        "embedding_multiplier": draw.choice((12.0, 6.5)),
        "residual_multiplier": draw.choice((0.22, 0.7)),
        "logits_scaling": draw.choice((8.0, 3.7, 10.0)),
        "attention_multiplier": draw.choice((0.0078125, 0.5)),
        "attention_bias": bias,
        "mlp_bias": bias,
    }


RELEASED = {
    "granite3.3-8b": {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embedding_multiplier": 12.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "granite",
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49159,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "attention_multiplier": 0.0078125,
        "hidden_size": 4096,
        "intermediate_size": 12800,
        "logits_scaling": 16.0,
    },
    "granite3.3-2b": {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embedding_multiplier": 12.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "granite",
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49159,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "attention_multiplier": 0.015625,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "logits_scaling": 8.0,
    },
}
