"""Default values of each model family, and the dimensions that a run must give.

`models/families.py` says which values a Hugging Face folder of a family can hold; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DIMENSIONS = ("family", "layers", "hidden", "heads")
"""Dimensions that every run must give.

`ffn_hidden`, `kv_heads` and `head_dim` follow from these by convention; the rest has defaults.
"""
EXPERT_DIMENSIONS = ("experts", "experts_per_token", "expert_hidden")
"""Further dimensions for a model of `MIXTURES`."""
LATENT_DIMENSIONS = ("head_dim", "kv_rank", "rope_head_dim", "value_head_dim", "shared_expert_hidden")
"""Further dimensions for a model of `LATENT`."""
LATENT = ("deepseek_v2", "deepseek_v3")
"""Families with multi-head latent attention, whose experts are always shared in part."""
MIXTURES = ("mixtral", "qwen3_moe", *LATENT)
"""Families whose layers have experts."""
FAMILY_VALUES: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "tied": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "deepseek_v2": {"normalised_routing": False},
    "deepseek_v3": {"router": "sigmoid"},
}
"""Values of a family's architecture, where they differ from the defaults of `ModelSpec`."""
_FFN_MULTIPLE = 256


def required_dimensions(model: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that a `model` section must have after its preset or its weights' folder is applied."""
    family = model.get("family")
    latent = LATENT_DIMENSIONS if family in LATENT else ()
    return (*DIMENSIONS, *EXPERT_DIMENSIONS, *latent) if family in MIXTURES else DIMENSIONS


def ffn_width(hidden: int, mlp: object) -> tuple[int, str]:
    """The conventional `ffn_hidden` of a model, and its formula.

    GPT: 4 × hidden (Radford et al. 2019). SwiGLU has three matrices in place of two, so Llama takes 2/3 of that and rounds up to a
    multiple of 256 (Touvron et al. 2023).
    """
    if mlp == "gelu":
        return 4 * hidden, "4 × hidden"
    thirds = 8 * hidden // 3
    return -(-thirds // _FFN_MULTIPLE) * _FFN_MULTIPLE, f"8/3 × hidden, rounded up to a multiple of {_FFN_MULTIPLE}"
