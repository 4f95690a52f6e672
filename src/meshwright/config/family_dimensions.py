"""Says which dimensions of a model a run must give, and computes those that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.families.registry import FAMILIES

DIMENSIONS = ("family", "layers", "hidden", "heads")
"""Dimensions that every run must give.

`ffn_hidden`, `kv_heads` and `head_dim` follow from these by convention. The other dimensions have defaults.
"""
_FFN_MULTIPLE = 256
"""The conventional `ffn_hidden` of SwiGLU is a multiple of this."""


def required_dimensions(model: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that a `model` section must have, once the preset or the folder of weights has been applied."""
    family = FAMILIES.get(str(model.get("family")))
    return DIMENSIONS if family is None else (*DIMENSIONS, *family.required)


def ffn_width(hidden: int, mlp: object) -> tuple[int, str]:
    """Return the conventional `ffn_hidden` of a model, and its formula as text. `mlp` is the value of `model.mlp`.

    GELU has 4 × hidden (Radford et al. 2019). SwiGLU has three matrices in place of two. So Llama takes 2/3 of that, to
    keep the number of parameters, and rounds up to a multiple of 256 (Touvron et al. 2023). Example: hidden 4096 gives
    11008.
    """
    if mlp == "gelu":
        return 4 * hidden, "4 × hidden"
    thirds = 8 * hidden // 3
    return -(-thirds // _FFN_MULTIPLE) * _FFN_MULTIPLE, f"8/3 × hidden, rounded up to a multiple of {_FFN_MULTIPLE}"
