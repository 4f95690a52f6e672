"""Qwen2 and Qwen2.5, dense (Yang et al.

2024, arXiv 2407.10671 and 2412.15115): Llama with biases of queries, keys and values.

The presets are base models. They were trained on sequences of 4,096 tokens before their context was extended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import decoder, layers
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("use_mrope", False)
    fields = decoder.read(config)
    return {**fields, "sliding_window": layers.read_common_window(config, fields["layers"])}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**decoder.shortened(decoder.write(spec), spec), **layers.write_common_window(spec)}


FAMILY = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    values={"qkv_bias": True},
    from_config=_from_config,
    to_config=_to_config,
)
_SMALL = {"vocab_size": 151936, "norm_eps": 1e-6, "tied": True}
PRESETS = presets(
    {
        "qwen2.5-0.5b": size(24, 896, 14, 2, 4864, 6e-4, **_SMALL, head_dim=64, max_seq_len=32768),
        "qwen2.5-1.5b": size(28, 1536, 12, 2, 8960, 4e-4, **_SMALL),
        "qwen2.5-3b": size(36, 2048, 16, 2, 11008, 3e-4, **_SMALL, max_seq_len=32768),
        "qwen2.5-7b": size(28, 3584, 28, 4, 18944, 3e-4, norm_eps=1e-6),
        "qwen2.5-14b": size(48, 5120, 40, 8, 13824, 3e-4),
        "qwen2.5-32b": size(64, 5120, 40, 8, 27648, 1.5e-4),
        "qwen2.5-72b": size(80, 8192, 64, 8, 29568, 1.5e-4),
    },
    seq_len=4096,
    head_dim=128,
    vocab_size=152064,
    max_seq_len=131072,
    rope_theta=1000000.0,
    norm_eps=1e-5,
)
RELEASES = ("Qwen2.5-7B-Instruct", "Qwen2.5-72B-Instruct", "Qwen2-7B-Instruct")
