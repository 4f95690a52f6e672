"""Gemma 2: small random models, published numbers of parameters, and mistakes that raise no error."""

from __future__ import annotations

import random
from typing import Any

from tests.families.cases import gemma
from tests.families.drawn import small

PARAMETERS = {"gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320}


def config(draw: random.Random) -> dict[str, Any]:
    """Caps that bind, a score scale of its own, and windows in some layers."""
    layers, head_dim = draw.choice((3, 4)), draw.choice((8, 12))
    types = draw.choice((None, ["full_attention", "sliding_attention"] * 2, ["sliding_attention"] * 4))
    return {
        **small(draw),
        "initializer_range": 0.3,
        "num_hidden_layers": layers,
        "pad_token_id": None,  # transformers gives its embedding no gradient
        "head_dim": head_dim,
        "query_pre_attn_scalar": draw.choice((head_dim, 5, 16)),
        "sliding_window": draw.choice((5, 16)),
        "layer_types": None if types is None else types[:layers],
        "attn_logit_softcapping": draw.choice((2.0, 5.0)),
        "final_logit_softcapping": draw.choice((3.0, 30.0)),
    }


RELEASED = {
    "gemma2-9b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
        "torch_dtype": "float32",
        "transformers_version": "4.42.0.dev0",
        "use_cache": True,
        "vocab_size": 256000,
    }
}
WRONG = {
    "scores not capped": lambda spec: {"score_cap": None},
    "logits not capped": lambda spec: {"logit_cap": None},
    "norms without + 1": lambda spec: {"norm_plus_one": False},
    "embeddings not scaled": lambda spec: {"embedding_scale": 1.0},
    "the usual scale of scores": lambda spec: {"score_scale": None} if spec.score_scale else {},
    "no norms of outputs": lambda spec: {"output_norms": False},
    "a window one longer": lambda spec: {"sliding_window": spec.sliding_window + 1},
    "gates with SiLU": lambda spec: {"mlp": "swiglu"},
}
INJECTED = gemma.INJECTED
