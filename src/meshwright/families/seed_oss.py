"""Seed-OSS (ByteDance Seed 2025): Llama with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import ConfigKeys, HFConfig, Key, presets, size
from meshwright.families.keys import decoder
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_KEYS = ConfigKeys({"qkv_bias": Key("attention_bias", True)}, fixed={"attention_out_bias": False, "mlp_bias": False})


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.note_unused(decoder.NO_DROPOUT, "residual_dropout")
    return {**_KEYS.read(config), **decoder.read(config, head_dim=128)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**decoder.write(spec), **_KEYS.write(spec), "residual_dropout": 0.0}


FAMILY = replace(
    LLAMA,
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    values={"qkv_bias": True},
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {"seed-oss-36b": size(64, 5120, 80, 8, 27648, 1.5e-4)},
    seq_len=8192,
    head_dim=128,
    vocab_size=155136,
    max_seq_len=524288,
    rope_theta=10000000.0,
    norm_eps=1e-6,
)
RELEASES = ("Seed-OSS-36B-Instruct",)
