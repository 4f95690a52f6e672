"""Mistral (Jiang et al. 2023): Llama in which each token may attend only to a window of earlier tokens.

If config.json has no key `sliding_window`, the window is the default of the class, 4096 tokens. The value null means no
window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import decoder, layers
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    return {**decoder.read(config), "sliding_window": layers.read_window(config, 4096)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**decoder.write(spec), "sliding_window": spec.sliding_window}


FAMILY = MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {
        "mistral-7b": size(32, 4096, 32, 8, 14336, 3e-4, vocab_size=32000, sliding_window=4096),
        "mistral-nemo-12b": size(40, 5120, 32, 8, 14336, 2e-4, max_seq_len=131072, rope_theta=1000000.0),
        "mistral-small-24b": size(40, 5120, 32, 8, 32768, 2e-4, rope_theta=100000000.0),
    },
    seq_len=8192,
    head_dim=128,
    vocab_size=131072,
    max_seq_len=32768,
)
RELEASES = ("Mistral-7B-Instruct-v0.3", "Mistral-Nemo-Instruct-2407", "Mistral-Small-24B-Instruct-2501")
