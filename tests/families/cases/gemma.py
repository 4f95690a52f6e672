"""Gemma: small random models, published numbers of parameters, and mistakes that raise no error."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.families.drawn import small

PARAMETERS = {"gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896}
WRONG = {
    "norms without one": lambda spec: {"norm_plus_one": False},
    "embeddings without their factor": lambda spec: {"embedding_scale": 1.0},
    "SiLU": lambda spec: {"mlp": "swiglu"},
}


def _exact_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, approximate: torch.ops.aten.gelu(x))


INJECTED = {"GELU without the tanh": _exact_gelu}


def config(draw: random.Random) -> dict[str, Any]:
    return {**small(draw), "pad_token_id": None, "head_dim": draw.choice((8, 12))}


RELEASED = {
    "gemma-2b": {
        "architectures": ["GemmaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_act": "gelu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 16384,
        "max_position_embeddings": 8192,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 256000,
    }
}
