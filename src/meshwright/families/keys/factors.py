"""Keys for Granite's constant factors: of embeddings, of the outputs that layers add, of attention scores, and of logits."""

from __future__ import annotations

from typing import Any

from meshwright.families.format import ConfigKeys, HFConfig, Key
from meshwright.spec.model import ModelSpec

_KEYS = ConfigKeys(
    {"embedding_scale": Key("embedding_multiplier", 1.0), "residual_factor": Key("residual_multiplier", 1.0)},
)


def read(config: HFConfig, head_dim: int) -> dict[str, Any]:
    """Return the ModelSpec fields of these keys."""
    scale = config.number("attention_multiplier", 1.0)
    logit_factor = 1.0 / config.number("logits_scaling", 1.0)
    score_scale = None if scale == head_dim**-0.5 else scale
    return {**_KEYS.read(config), "logit_factor": logit_factor, "score_scale": score_scale}


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys with their values."""
    divisor = 1.0 / spec.logit_factor
    rounded = float(f"{divisor:.15g}")  # If its inverse is exactly our factor, this is the divisor that was read.
    return {
        **_KEYS.write(spec),
        "logits_scaling": rounded if 1.0 / rounded == spec.logit_factor else divisor,
        "attention_multiplier": spec.head_dim**-0.5 if spec.score_scale is None else spec.score_scale,
    }
