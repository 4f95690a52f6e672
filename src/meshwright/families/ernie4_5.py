"""ERNIE 4.5, dense (Baidu 2025): Llama in which RoPE rotates pairs of neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import ConfigKeys, HFConfig, Key, presets, size
from meshwright.families.keys import decoder
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_KEYS = ConfigKeys({"bias": Key("use_bias", False)})


def _from_config(config: HFConfig) -> dict[str, Any]:
    return {**decoder.read(config, head_dim=128, base=500_000.0), **_KEYS.read(config)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    keys = {**decoder.write(spec), **_KEYS.write(spec)}
    del keys["attention_dropout"]  # The class in transformers has no such key.
    return keys


FAMILY = ERNIE4_5 = replace(
    LLAMA,
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    score_class=None,
    values={"rope_pairs": "neighbours", "tied": True},
    from_config=_from_config,
    to_config=_to_config,
)
RELEASED = {
    "seq_len": 4096,
    "head_dim": 128,
    "vocab_size": 103424,
    "max_seq_len": 131072,
    "rope_theta": 500_000.0,
}
"""Fields that all released models have in common, also those with experts."""
PRESETS = presets({"ernie4.5-0.3b": size(18, 1024, 16, 2, 3072, 6e-4)}, **RELEASED)
RELEASES = ("ERNIE-4.5-0.3B-PT",)
