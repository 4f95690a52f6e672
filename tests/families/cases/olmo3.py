"""OLMo 3: small random models, and the published numbers of parameters."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.families.cases.olmo2 import two_heads
from tests.families.drawn import small, yarn

PARAMETERS = {"olmo3-7b": 7_298_011_136, "olmo3-32b": 32_233_522_176}
WRONG = {
    "a window of one token more": lambda spec: {"sliding_window": spec.sliding_window + 1},
    "no YaRN": lambda spec: {"blocks": {**spec.blocks, "global": replace(spec.blocks["global"], yarn=None)}},
    "YaRN in all layers": lambda spec: {
        "blocks": {**spec.blocks, "local": replace(spec.blocks["local"], yarn=spec.blocks["global"].yarn)}
    },
    "another factor of the rotated part": lambda spec: {
        "blocks": {
            **spec.blocks,
            "global": replace(
                spec.blocks["global"],
                yarn=replace(spec.blocks["global"].yarn, attention_factor=0.9),
            ),
        }
    },
    "norms of single heads": lambda spec: {"qk_norm_whole": False},
}


def config(draw: random.Random) -> dict[str, Any]:
    keys = {**small(draw), "num_hidden_layers": draw.choice((3, 5))}
    scaled = yarn(draw)
    kinds = ["sliding_attention", "full_attention"]
    types = kinds + [draw.choice(kinds) for _ in range(keys["num_hidden_layers"] - 2)]
    return {
        **keys,
        **two_heads(keys),
        "pad_token_id": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": scaled["rope_theta"]},
            "full_attention": scaled,
        },
        "sliding_window": draw.choice((5, 16)),
        "layer_types": types,
    }


RELEASED = {
    "olmo3-7b": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-06,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "architectures": ["Olmo3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "sliding_window": 4096,
        "vocab_size": 100278,
    }
}
