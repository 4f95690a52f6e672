"""Mixtral: small random models, and the published number of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

IN_MEMORY = (".mlp.", ".block_sparse_moe.")
PARAMETERS = {"mixtral-8x7b": 46_702_792_704}
WRONG = {
    "weights normalised the other way": lambda spec: {"normalised_routing": not spec.normalised_routing},
    "a window of one token more": lambda spec: (
        {"sliding_window": spec.sliding_window + 1} if spec.sliding_window else {}
    ),
    "neighbours rotated": lambda spec: {"rope_pairs": "neighbours"},
}


def config(draw: random.Random) -> dict[str, Any]:
    experts = {"num_local_experts": draw.choice((4, 5)), "num_experts_per_tok": draw.choice((2, 3))}
    return {**small(draw), **experts, "sliding_window": draw.choice((None, 7)), "head_dim": draw.choice((6, 12))}


RELEASED = {
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    }
}
