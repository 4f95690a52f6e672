"""SmolLM3: small random models, and the published number of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {"smollm3-3b": 3_075_098_624}
CHANGED = {"no_rope_layer_interval", "sliding_window", "use_sliding_window"}
"""With `no_rope_layers` the interval has no effect, and a window has none where no layer has it."""
WRONG = {
    "all layers rotated": lambda spec: (
        {"blocks": {}, "pattern": (), "positions": "rope"}
        if {kind.mixer.rotary is None for kind in spec.block_kinds} == {True, False}
        else {}
    ),
    "neighbours rotated": lambda spec: {"rope_pairs": "neighbours"},
}


def config(draw: random.Random) -> dict[str, Any]:
    keys = {
        **small(draw),
        "pad_token_id": None,
        "num_hidden_layers": draw.choice((3, 5)),
        "no_rope_layer_interval": draw.choice((2, 3, 4)),
    }
    if draw.random() < 0.5:
        keys["no_rope_layers"] = [int(draw.random() < 0.6) for _ in range(keys["num_hidden_layers"])]
    if draw.random() < 0.5:
        keys |= {"use_sliding_window": True, "sliding_window": draw.choice((5, 16))}
    bias = draw.random() < 0.3
    return {**keys, "attention_bias": bias, "mlp_bias": bias}


RELEASED = {
    "smollm3-3b": {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.53.0",
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": 128256,
    }
}
