"""Ministral 3: small random models, and the published number of parameters."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.families.drawn import small, yarn

PARAMETERS = {"ministral3-8b": 8_489_553_920}
WRONG = {
    "queries of equal size": lambda spec: {"query_growth": 0.0},
    "queries that grow from the first token on": lambda spec: {
        "yarn": replace(spec.yarn, original_max_seq_len=spec.yarn.original_max_seq_len + 1)
    },
    "no YaRN": lambda spec: {"yarn": None, "query_growth": 0.0},
}


def config(draw: random.Random) -> dict[str, Any]:
    rope = {**yarn(draw), "llama_4_scaling_beta": draw.choice((0.1, 0.5))}
    window = draw.choice((None, 9))
    return {
        **small(draw),
        "pad_token_id": None,
        "rope_parameters": rope,
        "sliding_window": window,
        "head_dim": draw.choice((6, 12)),
    }


RELEASED = {
    "ministral3-8b": {
        "architectures": ["Ministral3ForCausalLM"],
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
}
