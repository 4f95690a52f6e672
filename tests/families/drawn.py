"""Random keys of small models of transformers, which the cases of families share."""

from __future__ import annotations

import random
from typing import Any


def small(draw: random.Random, *, rotated_multiple: int = 2) -> dict[str, Any]:
    """Keys of Llama and the families that follow it."""
    kv_heads = draw.choice((1, 2, 3))
    heads = kv_heads * draw.choice((1, 2))
    return {
        "vocab_size": draw.choice((67, 96)),
        "hidden_size": heads * rotated_multiple * draw.choice((4, 5)),
        "intermediate_size": draw.choice((40, 56)),
        "num_hidden_layers": draw.choice((2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": draw.choice((128, 300)),
        "initializer_range": 0.15,
        "rms_norm_eps": draw.choice((1e-5, 1e-6, 1e-3)),
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice((100.0, 1e4, 1e6))},
    }


def windowed(draw: random.Random) -> dict[str, Any]:
    """Keys of a sliding window of all layers, or of none, as Qwen2 and Qwen3 have them."""
    if draw.random() < 0.5:
        return {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1}
    return {"use_sliding_window": True, "sliding_window": draw.choice((5, 16)), "max_window_layers": 0}


def yarn(draw: random.Random) -> dict[str, Any]:
    """A RoPE section with YaRN scaling, by one of the ways to its factor of the rotated part."""
    return {
        "rope_type": "yarn",
        "rope_theta": draw.choice((1e4, 1e6)),
        "factor": draw.choice((2.0, 16.0)),
        "original_max_position_embeddings": draw.choice((8, 16)),
        "beta_fast": draw.choice((4.0, 32.0)),
        "beta_slow": 1.0,
        **draw.choice(
            (
                {},
                {"mscale": 1.0, "mscale_all_dim": 1.0},
                {"mscale": 1.0, "mscale_all_dim": 0.5},
                {"attention_factor": 1.2079441541679836},
            )
        ),
    }


def llama3(draw: random.Random) -> dict[str, Any]:
    """A RoPE section with Llama 3.1's scaling."""
    return {
        "rope_type": "llama3",
        "rope_theta": draw.choice((1e4, 5e5)),
        "factor": draw.choice((4.0, 8.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": draw.choice((2.0, 4.0)),
        "original_max_position_embeddings": draw.choice((16, 50)),
    }
