"""Granite MoE: small random models, published numbers of parameters, and mistakes that raise no error."""

from __future__ import annotations

import random
from typing import Any

from tests.families.cases import granite

PARAMETERS = {"granite3.1-1b-a400m": 1_334_628_352, "granite3.1-3b-a800m": 3_298_793_472}
IN_MEMORY = (".router.weight", ".router.layer.weight")
WRONG = {
    **granite.WRONG,
    "weights of all experts": lambda spec: {"normalised_routing": False},
    "no biases": lambda spec: {"qkv_bias": False, "out_bias": False} if spec.qkv_bias else {},
}


def config(draw: random.Random) -> dict[str, Any]:
    keys = granite.config(draw)
    del keys["mlp_bias"]
    return {
        **keys,
        "intermediate_size": draw.choice((16, 24)),
        "num_local_experts": draw.choice((4, 6)),
        "num_experts_per_tok": draw.choice((2, 3)),
    }


RELEASED = {
    "granite3.1-1b-a400m": {
        "architectures": ["GraniteMoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "max_position_embeddings": 131072,
        "model_type": "granitemoe",
        "num_attention_heads": 16,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1500000.0,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 49155,
    }
}
