"""GPT-2: small random models, and the number of parameters of the released folder."""

from __future__ import annotations

import random
from typing import Any

PARAMETERS = {"gpt2-124m": 124_439_808}
WRONG = {
    "no biases": lambda spec: {"bias": False},
    "norms without the mean": lambda spec: {"norm": "rmsnorm"},
}


def config(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice((2, 3))
    return {
        "vocab_size": draw.choice((67, 96)),
        "n_embd": heads * draw.choice((8, 10)),
        "n_head": heads,
        "n_layer": draw.choice((2, 3)),
        "n_inner": draw.choice((None, 48)),
        "n_positions": draw.choice((128, 300)),
        "layer_norm_epsilon": draw.choice((1e-5, 1e-3)),
        "initializer_range": 0.15,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": draw.random() < 0.5,
    }


CHANGED = {"n_inner", "n_ctx"}
"""Our folders have a number for `n_inner`, where the class multiplies the width by 4, and the old `n_ctx`."""
RELEASED = {
    "gpt2-124m": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }
}
