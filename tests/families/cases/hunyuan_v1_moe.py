"""Hunyuan with experts: small random models, and the number of parameters of the released model."""

from __future__ import annotations

import random
from typing import Any

from tests.families.cases import hunyuan_v1_dense

PARAMETERS = {"hunyuan-a13b": 80_393_183_232}
"""Of transformers' class with the keys below."""
WRONG = {
    **hunyuan_v1_dense.WRONG,
    "no shared expert": lambda spec: {"shared_expert_hidden": 0},
    "weights not normalised": lambda spec: {"normalised_routing": False},
}
CHANGED = hunyuan_v1_dense.CHANGED


def config(draw: random.Random) -> dict[str, Any]:
    keys = hunyuan_v1_dense.config(draw)
    routed = {"intermediate_size": draw.choice((16, 24)), "num_experts": 8}
    return {**keys, **routed, "moe_topk": draw.choice((2, 3)), "output_router_logits": False}


RELEASED = {
    "hunyuan-a13b": {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "attention_bias": False,
        "attention_head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 3072,
        "max_position_embeddings": 32768,
        "model_type": "hunyuan_v1_moe",
        "moe_intermediate_size": [3072] * 32,
        "moe_topk": [8] * 32,
        "num_attention_heads": 32,
        "num_experts": 64,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_shared_expert": [1] * 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_cla": False,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "vocab_size": 128167,
    }
}
