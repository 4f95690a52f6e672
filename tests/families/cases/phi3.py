"""Phi-3 and Phi-4: small random models, and the published numbers of parameters."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from meshwright.families.phi3 import LONG_FACTOR
from meshwright.spec.model import ModelSpec
from tests.families.drawn import small

PARAMETERS = {
    "phi3-mini-4k": 3_821_079_552,
    "phi3-medium-4k": 13_960_238_080,
    "phi4-14b": 14_659_507_200,
    "phi4-mini": 3_836_021_760,
}
CHANGED = {"partial_rotary_factor"}
"""Written beside the RoPE section too, where older readers expect it."""
WRONG = {
    "the divisors of other lengths": lambda spec: _swapped(spec),
    "another factor of the rotated part": lambda spec: _longrope(spec, attention_factor=0.9),
    "no LongRoPE": lambda spec: {"longrope": None} if spec.longrope else {},
    "whole heads rotated": lambda spec: {"rope_width": 0, "longrope": None} if spec.rope_width else {},
    "a window of one token more": lambda spec: {"sliding_window": (spec.sliding_window or 9) + 1},
}


def _swapped(spec: ModelSpec) -> dict[str, Any]:
    scaling = spec.longrope
    return _longrope(spec, short_factor=scaling.long_factor, long_factor=scaling.short_factor) if scaling else {}


def _longrope(spec: ModelSpec, **fields: Any) -> dict[str, Any]:
    return {"longrope": replace(spec.longrope, **fields)} if spec.longrope else {}


def config(draw: random.Random) -> dict[str, Any]:
    keys = small(draw, rotated_multiple=4)
    share = draw.choice((1.0, 0.5))
    pairs = int(keys["hidden_size"] // keys["num_attention_heads"] * share) // 2
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    original = draw.choice((16, 64))
    if draw.random() < 0.7:
        rope |= {
            "type": "longrope",
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.1 * n for n in range(pairs)],
            "long_factor": [1.5 + n * n for n in range(pairs)],
            **draw.choice(({}, {"attention_factor": 1.25})),
        }
    window = draw.choice((None, 9))
    return {
        **keys,
        "rope_parameters": rope,
        "original_max_position_embeddings": original if "type" in rope else 4096,
        "max_position_embeddings": 256,
        "sliding_window": window,
        "pad_token_id": None,
        "eos_token_id": 2,
    }


RELEASED = {
    "phi4-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "model_type": "phi3",
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "full_attn_mod": 1,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"long_factor": LONG_FACTOR, "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
    "phi4-14b": {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "model_type": "phi3",
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "max_position_embeddings": 16384,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384,
        "rope_scaling": None,
        "rope_theta": 250000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "phi3-mini-4k": {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "model_type": "phi3",
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
}
