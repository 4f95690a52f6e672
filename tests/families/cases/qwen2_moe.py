"""Qwen2-MoE: small random models, published numbers of parameters, and mistakes that raise no error."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {"qwen1.5-moe-a2.7b": 14_315_784_192, "qwen2-57b-a14b": 57_408_658_944}
CHANGED = {"max_window_layers", "sliding_window", "decoder_sparse_step"}
"""Layers with a window are listed; without one it has no effect, and a step of 1 has dense layers listed."""


def config(draw: random.Random) -> dict[str, Any]:
    windows: dict[str, Any] = {"use_sliding_window": False}
    if draw.random() < 0.6:
        last, window = draw.choice((1, 2, 28)), draw.choice((5, 16))
        windows = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": last}
    return {
        **small(draw),
        **windows,
        "qkv_bias": draw.random() < 0.7,
        "num_experts": draw.choice((4, 6)),
        "num_experts_per_tok": draw.choice((2, 3)),
        "moe_intermediate_size": draw.choice((16, 24)),
        "shared_expert_intermediate_size": draw.choice((12, 32)),
        "norm_topk_prob": draw.random() < 0.5,
        "mlp_only_layers": draw.choice(([], [0])),
    }


RELEASED = {
    "qwen1.5-moe-a2.7b": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.39.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
}
WRONG = {
    "weights normalised the other way": lambda spec: {"normalised_routing": not spec.normalised_routing},
    "no gate of the shared expert": lambda spec: {"shared_expert_gate": False},
    "no shared expert": lambda spec: {"shared_expert_gate": False, "shared_expert_hidden": 0},
    "no biases": lambda spec: {"qkv_bias": False} if spec.qkv_bias else {},
}
