"""FlexOlmo: small random models with OLMoE's keys, and the published number of parameters."""

from __future__ import annotations

from typing import Any

from tests.families.cases import olmoe

config = olmoe.config
PARAMETERS = {"flex-olmo-7x7b": 33_270_665_216}
RELEASED: dict[str, Any] = {}
WRONG = {
    **olmoe.WRONG,
    "norms of inputs": lambda spec: {"input_norms": True, "output_norms": False},
}
