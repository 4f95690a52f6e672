"""Seed-OSS (ByteDance Seed 2025): Llama with biases of queries, keys and values. The preset is as released.

Its learning rate was not published: this is that of other models of like size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes
from meshwright.families.llama import LLAMA, NO_DROPOUT, gated_decoder_config, gated_decoder_fields
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    for key in ("attention_out_bias", "mlp_bias"):
        config.expect(key, False)
    config.note_unused(NO_DROPOUT, "residual_dropout")
    return {
        **gated_decoder_fields(config),
        "head_dim": config.integer("head_dim", default=128),
        "qkv_bias": config.flag("attention_bias", True),
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        **gated_decoder_config(spec),
        "attention_bias": spec.qkv_bias,
        "attention_out_bias": False,
        "mlp_bias": False,
        "residual_dropout": 0.0,
    }


FAMILY = replace(
    LLAMA,
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    values={"qkv_bias": True},
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = {
    "seed-oss-36b": Preset(
        model={
            **sizes(64, 5120, 80, 27648),
            "kv_heads": 8,
            "head_dim": 128,
            "vocab_size": 155136,
            "max_seq_len": 524288,
            "rope_theta": 10000000.0,
            "norm_eps": 1e-6,
        },
        learning_rate=1.5e-4,
        seq_len=8192,
    )
}
