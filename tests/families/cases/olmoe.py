"""OLMoE: small random models, the published number of parameters, and mistakes that raise no error."""

from __future__ import annotations

import random
from typing import Any

from tests.families.cases.olmo2 import two_heads
from tests.families.drawn import small

PARAMETERS = {"olmoe-1b-7b": 6_919_161_856}
WRONG = {
    "weights normalised the other way": lambda spec: {"normalised_routing": not spec.normalised_routing},
    "norms of single heads": lambda spec: {"qk_norm_whole": False},
    "one expert fewer": lambda spec: {"experts_per_token": spec.experts_per_token - 1},
}


def config(draw: random.Random) -> dict[str, Any]:
    keys = small(draw)
    return {
        **keys,
        **two_heads(keys),
        "pad_token_id": None,
        "intermediate_size": draw.choice((16, 24)),
        "num_experts": draw.choice((4, 6)),
        "num_experts_per_tok": draw.choice((2, 3)),
        "norm_topk_prob": draw.random() < 0.5,
    }


RELEASED = {
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 50304,
    }
}
