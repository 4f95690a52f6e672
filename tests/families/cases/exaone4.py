"""EXAONE 4: small random models, published numbers of parameters, and mistakes that raise no error."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.families.drawn import llama3, small

PARAMETERS = {"exaone4-1.2b": 1_279_391_488, "exaone4-32b": 32_003_216_384}
CHANGED = {"sliding_window_pattern"}
"""The layers are listed."""
WRONG = {
    "rotation in all layers": lambda spec: (
        {"blocks": {**spec.blocks, "global": replace(spec.blocks["global"], positions=None)}} if spec.blocks else {}
    ),
    "a window of one token more": lambda spec: (
        {"sliding_window": spec.sliding_window + 1} if spec.sliding_window else {}
    ),
    "norms of inputs": lambda spec: {"input_norms": True, "output_norms": False},
    "no norms of heads": lambda spec: {"qk_norm": False},
}


def config(draw: random.Random) -> dict[str, Any]:
    keys = small(draw)
    full, local = ["full_attention"], ["sliding_attention"]
    types = [*local, *full, *local][: keys["num_hidden_layers"]]
    windows = draw.choice(
        (
            {"sliding_window": draw.choice((5, 16)), "layer_types": types},
            {"sliding_window": 7, "sliding_window_pattern": 2},
            {"sliding_window": None, "layer_types": full * keys["num_hidden_layers"]},
        )
    )
    return {**keys, **windows, **({"rope_parameters": llama3(draw)} if draw.random() < 0.5 else {})}


_ROPE = {
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
}
RELEASED = {
    "exaone4-32b": {
        "architectures": ["Exaone4ForCausalLM"],
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 27392,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
        "max_position_embeddings": 131072,
        "model_type": "exaone4",
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        **_ROPE,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False,
        "vocab_size": 102400,
    }
}
