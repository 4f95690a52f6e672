"""Granite 3 (IBM 2024): Llama with factors of embeddings, of what layers add, of scores and of logits. The presets are as released.

Their learning rates were not published: these are those of other models of like size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes, whole_width
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = LLAMA.from_config(config)
    return {**fields, **factors(config, fields["head_dim"])}


def factors(config: HFConfig, head_dim: int) -> dict[str, Any]:
    """The ModelSpec fields of the factors."""
    scale = config.number("attention_multiplier", 1.0)
    return {
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_factor": config.number("residual_multiplier", 1.0),
        "logit_factor": 1.0 / config.number("logits_scaling", 1.0),
        "score_scale": None if scale == head_dim**-0.5 else scale,
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**whole_width(LLAMA.to_config(spec), spec), **factor_keys(spec)}


def factor_keys(spec: ModelSpec) -> dict[str, Any]:
    """The config.json keys of the factors."""
    divisor = 1.0 / spec.logit_factor
    rounded = float(f"{divisor:.15g}")  # the divisor that was read, if its inverse is our factor
    return {
        "embedding_multiplier": spec.embedding_scale,
        "residual_multiplier": spec.residual_factor,
        "logits_scaling": rounded if 1.0 / rounded == spec.logit_factor else divisor,
        "attention_multiplier": spec.head_dim**-0.5 if spec.score_scale is None else spec.score_scale,
    }


FAMILY = GRANITE = replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    score_class=None,
    from_config=_from_config,
    to_config=_to_config,
)
_RELEASED = {
    "kv_heads": 8,
    "vocab_size": 49159,
    "max_seq_len": 131072,
    "rope_theta": 10000000.0,
    "embedding_scale": 12.0,
    "residual_factor": 0.22,
    "tied": True,
}
PRESETS = {
    "granite3.3-2b": Preset(
        model={**sizes(40, 2048, 32, 8192), **_RELEASED, "head_dim": 64, "score_scale": 1 / 64, "logit_factor": 1 / 8},
        learning_rate=4e-4,
        seq_len=8192,
    ),
    "granite3.3-8b": Preset(
        model={
            **sizes(40, 4096, 32, 12800),
            **_RELEASED,
            "head_dim": 128,
            "score_scale": 1 / 128,
            "logit_factor": 1 / 16,
        },
        learning_rate=3e-4,
        seq_len=8192,
    ),
}
