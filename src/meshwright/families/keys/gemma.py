"""Keys of config.json that Gemma 2 and Gemma 3 have in common."""

from __future__ import annotations

import math
from typing import Any

from meshwright.families.format import ConfigKeys, HFConfig, Key
from meshwright.families.keys.decoder import NO_DROPOUT
from meshwright.spec.model import ModelSpec

_KEYS = ConfigKeys(
    {
        "hidden": Key("hidden_size", 2304),
        "head_dim": Key("head_dim", 256),
        "layers": Key("num_hidden_layers", 26),
        "heads": Key("num_attention_heads", 8),
        "kv_heads": Key("num_key_value_heads", 4),
        "ffn_hidden": Key("intermediate_size", 9216),
        "norm_eps": Key("rms_norm_eps", 1e-6),
        "init_std": Key("initializer_range", 0.02),
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
)


def read(config: HFConfig, *, vocab_size: int, max_seq_len: int) -> dict[str, Any]:
    """Return the ModelSpec fields of these keys. `vocab_size` and `max_seq_len` are defaults of the class."""
    config.expect("use_bidirectional_attention", False)
    config.note_unused(NO_DROPOUT, "attention_dropout")
    fields = _KEYS.read(config)
    scalar = config.number("query_pre_attn_scalar", 256)
    return {
        **fields,
        "vocab_size": config.integer("vocab_size", default=vocab_size),
        "max_seq_len": config.integer("max_position_embeddings", default=max_seq_len),
        **by_width(fields["hidden"]),
        "score_scale": None if scalar == fields["head_dim"] else scalar**-0.5,
    }


def by_width(hidden: int) -> dict[str, float]:
    """Return the factor by which embeddings are multiplied."""
    return {"embedding_scale": math.sqrt(hidden)}


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys with their values."""
    return {
        **_KEYS.write(spec),
        "max_position_embeddings": spec.max_seq_len,
        "attention_dropout": 0.0,
        "query_pre_attn_scalar": spec.head_dim if spec.score_scale is None else round(spec.score_scale**-2),
    }
