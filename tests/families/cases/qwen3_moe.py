"""Qwen3-MoE: small random models, and published numbers of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small, windowed

PARAMETERS = {"qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560}
CHANGED = {"max_window_layers"}
"""The class has no such key."""
WRONG = {
    "weights normalised the other way": lambda spec: {"normalised_routing": not spec.normalised_routing},
    "no norms of queries and keys": lambda spec: {"qk_norm": False},
    "a window of one token more": lambda spec: (
        {"sliding_window": spec.sliding_window + 1} if spec.sliding_window else {}
    ),
}


def config(draw: random.Random) -> dict[str, Any]:
    keys = {**small(draw), **windowed(draw), "head_dim": draw.choice((6, 12))}
    experts = {
        "num_experts": draw.choice((4, 6)),
        "num_experts_per_tok": draw.choice((2, 3)),
        "moe_intermediate_size": draw.choice((16, 24)),
        "norm_topk_prob": draw.random() < 0.5,
        "mlp_only_layers": draw.choice(([], [0])),
    }
    return {**keys, **experts}


RELEASED = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
}
