"""Granite MoE with a shared expert: small random models, and mistakes that raise no error."""

from __future__ import annotations

import random
from typing import Any

from tests.families.cases import granitemoe

PARAMETERS: dict[str, int] = {}
RELEASED: dict[str, Any] = {}
IN_MEMORY = granitemoe.IN_MEMORY
WRONG = {
    **granitemoe.WRONG,
    "no shared expert": lambda spec: {"shared_expert_hidden": 0} if spec.shared_expert_hidden else {},
}


def config(draw: random.Random) -> dict[str, Any]:
    return {**granitemoe.config(draw), "shared_intermediate_size": draw.choice((0, 12, 32))}
