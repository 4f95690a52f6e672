"""GLM-4.7-Flash: small random models of DeepSeek-V3, and the published number of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.cases import deepseek_v3

PARAMETERS = {"glm4.7-flash": 29_943_393_920}
"""Without the module that predicts a further token; the choice biases count."""
CHANGED = {*deepseek_v3.CHANGED, "first_k_dense_replace", "num_nextn_predict_layers"}
WRONG = deepseek_v3.WRONG
RELEASED: dict[str, Any] = {}


def config(draw: random.Random) -> dict[str, Any]:
    keys = {**deepseek_v3.config(draw), "v_head_dim": 16}
    dense = keys.pop("first_k_dense_replace")
    del keys["num_mtp_layers"]
    return {**keys, "mlp_layer_types": ["dense"] * dense + ["sparse"] * (keys["num_hidden_layers"] - dense)}
