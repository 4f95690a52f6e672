"""Mistral (Jiang et al. 2023): Llama, where each token may attend to a window of tokens. The presets are as released.

Learning rates were not published: these are those of other models of like size. A config.json without `sliding_window` has the window
of the class, 4096 tokens; one with null has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, sizes
from meshwright.families.llama import LLAMA, gated_decoder_config, gated_decoder_fields
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    window = None if config.get("sliding_window", 4096) is None else config.integer("sliding_window", default=4096)
    return {**gated_decoder_fields(config), "sliding_window": window}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**gated_decoder_config(spec), "sliding_window": spec.sliding_window}


_RELEASED = {"kv_heads": 8, "head_dim": 128, "max_seq_len": 32768}
FAMILY = MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = {
    "mistral-7b": Preset(
        model={**sizes(32, 4096, 32, 14336), **_RELEASED, "vocab_size": 32000, "sliding_window": 4096},
        learning_rate=3e-4,
        seq_len=8192,
    ),
    "mistral-nemo-12b": Preset(
        model={
            **sizes(40, 5120, 32, 14336),
            **_RELEASED,
            "vocab_size": 131072,
            "max_seq_len": 131072,
            "rope_theta": 1000000.0,
        },
        learning_rate=2e-4,
        seq_len=8192,
    ),
    "mistral-small-24b": Preset(
        model={**sizes(40, 5120, 32, 32768), **_RELEASED, "vocab_size": 131072, "rope_theta": 100000000.0},
        learning_rate=2e-4,
        seq_len=8192,
    ),
}
