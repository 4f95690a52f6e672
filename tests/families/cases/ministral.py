"""Ministral: small random models of Mistral whose layers differ in their window."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS: dict[str, int] = {}
RELEASED: dict[str, Any] = {}
WRONG = {
    "a window of one token more": lambda spec: (
        {"sliding_window": spec.sliding_window + 1} if spec.sliding_window else {}
    ),
    "a window in all layers": lambda spec: {"blocks": {}, "pattern": ()} if spec.blocks else {},
}


def config(draw: random.Random) -> dict[str, Any]:
    keys = {**small(draw), "sliding_window": draw.choice((5, 16)), "head_dim": draw.choice((6, 12))}
    types = ["full_attention", "sliding_attention", "sliding_attention"][: keys["num_hidden_layers"]]
    return {**keys, "layer_types": draw.choice((types, None))}
