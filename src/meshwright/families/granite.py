"""Granite 3 (IBM 2024): Llama with constant factors of embeddings, of layer outputs, of attention scores and of logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import decoder, factors
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = LLAMA.from_config(config)
    return {**fields, **factors.read(config, fields["head_dim"])}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**decoder.shortened(LLAMA.to_config(spec), spec), **factors.write(spec)}


FAMILY = replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    score_class=None,
    from_config=_from_config,
    to_config=_to_config,
)
RELEASED = {"embedding_scale": 12.0, "residual_factor": 0.22, "tied": True}
"""ModelSpec fields that all released models have in common, also those with experts."""
PRESETS = presets(
    {
        "granite3.3-2b": size(40, 2048, 32, 8, 8192, 4e-4, head_dim=64, score_scale=1 / 64, logit_factor=1 / 8),
        "granite3.3-8b": size(40, 4096, 32, 8, 12800, 3e-4, head_dim=128, score_scale=1 / 128, logit_factor=1 / 16),
    },
    seq_len=8192,
    vocab_size=49159,
    max_seq_len=131072,
    rope_theta=10000000.0,
    **RELEASED,
)
RELEASES = ("granite-3.3-2b-instruct", "granite-3.3-8b-instruct")
