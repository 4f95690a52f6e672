"""Hunyuan: small random models, and the number of parameters of the released model."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {"hunyuan-mt-7b": 7_504_932_864}
"""Of transformers' class with the keys below."""
WRONG = {
    "norms before rotation": lambda spec: {"qk_norm_rotated": False},
    "no norms of queries and keys": lambda spec: {"qk_norm": False, "qk_norm_rotated": False},
    "no biases": lambda spec: {"qkv_bias": False} if spec.qkv_bias else {},
    "the base not stretched": lambda spec: {"rope_theta": 10000.0} if spec.rope_theta > 20000 else {},
}
CHANGED = {"rope_parameters"}
"""An export writes the base that `alpha` makes."""


def config(draw: random.Random) -> dict[str, Any]:
    stretched = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": draw.choice((50.0, 1000.0))}
    return {
        **small(draw),
        "rope_parameters": draw.choice((stretched, {"rope_type": "default", "rope_theta": 10000.0})),
        "pad_token_id": None,
        "attention_bias": draw.random() < 0.5,
        "head_dim": draw.choice((8, 12)),
    }


RELEASED = {
    "hunyuan-mt-7b": {
        "add_classification_head": False,
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_head_dim": 128,
        "bos_token_id": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "mlp_bias": False,
        "model_type": "hunyuan_v1_dense",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "alpha": 100000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
        "vocab_size": 128256,
    }
}
