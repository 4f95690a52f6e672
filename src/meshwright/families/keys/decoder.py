"""Keys of Llama and the families that follow it: sizes, activation, norms and RoPE."""

from __future__ import annotations

from typing import Any

from meshwright.families.format import ConfigKeys, HFConfig, Key
from meshwright.families.keys import rope
from meshwright.spec.model import ModelSpec

NO_DROPOUT = "Meshwright trains without dropout, and evaluation has none"
"""Note on keys about dropout."""
HEAD_NORMS = {"attention.q_norm": ("self_attn.q_norm",), "attention.k_norm": ("self_attn.k_norm",)}
"""Names that most folders use for the norms of queries and keys."""
_SHARE = "partial_rotary_factor"
"""The fraction of each head's dimensions that RoPE rotates."""
_KEYS = ConfigKeys(
    {
        "heads": Key("num_attention_heads"),
        "hidden": Key("hidden_size"),
        "layers": Key("num_hidden_layers"),
        "ffn_hidden": Key("intermediate_size"),
        "vocab_size": Key("vocab_size"),
        "max_seq_len": Key("max_position_embeddings"),
        "init_std": Key("initializer_range", 0.02),
    }
)


def read(
    config: HFConfig, *, head_dim: int = 0, norm_eps: float = 1e-6, share: float | None = None, **options: Any
) -> dict[str, Any]:
    """Return the ModelSpec fields of these keys.

    - `head_dim`: default of the class. 0: hidden divided by heads.
    - `norm_eps`: default of the class.
    - `share`: default of the class for the rotated fraction of each head. None: the class has no such key.
    - `options`: arguments of `rope.read`.
    """
    config.expect("hidden_act", "silu", "swish")
    config.note_unused(NO_DROPOUT, "attention_dropout")
    fields = _KEYS.read(config)
    heads = fields["heads"]
    head_dim = config.integer("head_dim", default=head_dim or max(1, fields["hidden"] // heads))
    if share is not None:
        options["without_effect"] = frozenset({_SHARE})
    return {
        **fields,
        "kv_heads": config.integer("num_key_value_heads", default=heads),
        "head_dim": head_dim,
        "norm_eps": config.number("rms_norm_eps", norm_eps),
        **rope.read(config, **options),
        **({} if share is None else rope.read_share(config, head_dim, share)),
    }


def write(spec: ModelSpec, *, share: bool = False) -> dict[str, Any]:
    """Return the keys with their values. With `share`, also the rotated fraction of each head."""
    keys: dict[str, Any] = {
        **_KEYS.write(spec),
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "attention_dropout": 0.0,
        **rope.write(spec),
    }
    if share:
        rotated = {_SHARE: spec.rotary_dim / spec.head_dim}
        keys |= {**rotated, "rope_parameters": {**keys["rope_parameters"], **rotated}}
    return keys


def shortened(keys: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return `keys` without `head_dim` if readers compute the same value, as in released folders of some families."""
    implied = spec.head_dim * spec.heads == spec.hidden
    return {key: value for key, value in keys.items() if key != "head_dim" or not implied}
