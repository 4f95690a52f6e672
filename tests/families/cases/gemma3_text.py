"""Gemma 3, text."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.families.cases import gemma
from tests.families.drawn import small

PARAMETERS = {
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
}
"""Without embeddings 698, 3,209, 10,759 and 25,600 million, as in table 1 of the technical report."""
RELEASED = {
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "initializer_range": 0.02,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "use_cache": True,
        "vocab_size": 262144,
    },
    "gemma3-27b": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
"""That of 27B is the `text_config` of a folder that also reads images; class defaults are missing there."""
CHANGED = {"sliding_window_pattern", "_sliding_window_pattern"}
"""An export lists the layers in `layer_types`."""
WRONG = {
    "norms without + 1": lambda spec: {"norm_plus_one": False},
    "embeddings not scaled": lambda spec: {"embedding_scale": 1.0},
    "no norms of outputs": lambda spec: {"output_norms": False},
    "gates with SiLU": lambda spec: {"mlp": "swiglu"},
    "one rotary base": lambda spec: (
        {"blocks": {**spec.blocks, "global": replace(spec.blocks["global"], rope_theta=spec.rope_theta)}}
        if spec.blocks and spec.blocks["global"].rope_theta != spec.rope_theta
        else {}
    ),
    "a window of one token more": lambda spec: (
        {"sliding_window": spec.sliding_window + 1} if spec.sliding_window else {}
    ),
}
INJECTED = gemma.INJECTED


def config(draw: random.Random) -> dict[str, Any]:
    """Local and global layers in any order, one of them alone, scaled rotation, and a score scale of its own."""
    keys = small(draw)
    layers = draw.choice((3, 4))
    head_dim = draw.choice((8, 12))
    types = draw.choice(
        (
            None,
            ["sliding_attention", "full_attention"] * 2,
            ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            ["sliding_attention"] * 4,
        )
    )
    local = {"rope_type": "default", "rope_theta": draw.choice((100.0, 1e4))}
    whole = {**draw.choice(({"rope_type": "default"}, {"rope_type": "linear", "factor": draw.choice((4.0, 8.0))}))}
    whole["rope_theta"] = draw.choice((1e4, 1e6))
    if types is not None and "full_attention" not in types:  # the rotation of no layer is not kept
        whole = {"rope_type": "default", "rope_theta": 1e6}
    return {
        **keys,
        "num_hidden_layers": layers,
        "pad_token_id": None,  # transformers gives its embedding no gradient
        "head_dim": head_dim,
        "query_pre_attn_scalar": draw.choice((head_dim, 5, 16)),
        "sliding_window": draw.choice((5, 16)),
        "layer_types": None if types is None else types[:layers],
        **({"sliding_window_pattern": 2} if types is None else {}),
        "rope_parameters": {"sliding_attention": local, "full_attention": whole},
    }
