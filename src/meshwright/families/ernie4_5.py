"""ERNIE 4.5, dense (Baidu 2025): Llama that rotates neighbours. The preset has the dimensions of the released config file.

Its learning rate was not published: this is that of other models of like size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes
from meshwright.families.llama import LLAMA, gated_decoder_config, gated_decoder_fields
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = gated_decoder_fields(config, base=500_000.0)
    return {**fields, "head_dim": config.integer("head_dim", default=128), "bias": config.flag("use_bias", False)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    config = {**gated_decoder_config(spec), "use_bias": spec.bias}
    del config["attention_dropout"]  # the class has none
    return config


FAMILY = replace(
    LLAMA,
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    score_class=None,
    values={"rope_pairs": "neighbours", "tied": True},
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = {
    "ernie4.5-0.3b": Preset(
        model={
            **sizes(18, 1024, 16, 3072),
            "kv_heads": 2,
            "head_dim": 128,
            "vocab_size": 103424,
            "max_seq_len": 131072,
            "rope_theta": 500000.0,
        },
        learning_rate=6e-4,
        seq_len=4096,
    )
}
