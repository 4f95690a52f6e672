"""dots.llm1: small random models, the published number of parameters, and mistakes that raise no error."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

PARAMETERS = {"dots-llm1": 142_774_381_696}
"""The choice biases count."""
CHANGED = {"max_window_layers", "sliding_window"}
"""Layers with a window are listed; without one it has no effect."""
WRONG = {
    "softmax scores": lambda spec: {"router": "softmax"},
    "weights normalised the other way": lambda spec: {"normalised_routing": not spec.normalised_routing},
    "weights not scaled": lambda spec: {"routing_scale": 1.0} if spec.routing_scale != 1 else {},
    "no shared expert": lambda spec: {"shared_expert_hidden": 0},
    "no norms of heads": lambda spec: {"qk_norm": False},
    "a window in all layers": lambda spec: {"blocks": {}, "pattern": ()} if spec.blocks else {},
}


def config(draw: random.Random) -> dict[str, Any]:
    groups = draw.choice((1, 2))
    return {
        **small(draw),
        "head_dim": draw.choice((8, 12)),
        "moe_intermediate_size": draw.choice((16, 24)),
        "n_routed_experts": 8,
        "num_experts_per_tok": draw.choice((2, 3)),
        "n_shared_experts": draw.choice((1, 2)),
        "first_k_dense_replace": draw.choice((0, 1)),
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "n_group": 2 * groups,
        "topk_group": groups,
        "norm_topk_prob": draw.random() < 0.7,
        "sliding_window": draw.choice((5, 16)),
        "max_window_layers": draw.choice((1, 62)),
    }


RELEASED: dict[str, Any] = {}
