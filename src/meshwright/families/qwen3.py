"""Qwen3, dense (Yang et al. 2025): Llama with a norm of each query head and key head, and without biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import decoder, layers
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("attention_bias", False)
    fields = decoder.read(config, head_dim=128)
    return {**fields, "sliding_window": layers.read_common_window(config, fields["layers"])}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**decoder.write(spec), "attention_bias": False, **layers.write_common_window(spec)}


FAMILY = QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    modules={**LLAMA.modules, **decoder.HEAD_NORMS},
    values={"qk_norm": True},
    from_config=_from_config,
    to_config=_to_config,
)
RELEASED = {
    "seq_len": 8192,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_seq_len": 40960,
    "rope_theta": 1000000.0,
    "norm_eps": 1e-6,
}
"""Fields that all released models have in common, also those with experts."""
PRESETS = presets(
    {
        "qwen3-0.6b": size(28, 1024, 16, 8, 3072, 6e-4, tied=True),
        "qwen3-8b": size(36, 4096, 32, 8, 12288, 3e-4),
        "qwen3-32b": size(64, 5120, 64, 8, 25600, 1.5e-4),
    },
    **RELEASED,
)
RELEASES = ("Qwen3-8B", "Qwen3-0.6B", "Qwen3-32B")
