"""Gemma (Gemma Team 2024, arXiv 2403.08295): Llama with gated GELU, scaled embeddings, and norms that multiply by 1 + weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.gemma3_text import GEMMA3
from meshwright.families.keys import decoder
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_ACTIVATION = "gelu_pytorch_tanh"


def _from_config(config: HFConfig) -> dict[str, Any]:
    for key in ("hidden_act", "hidden_activation"):
        config.expect(key, _ACTIVATION, "gelu")  # Released folders have "gelu", an older name of the same function.
    for key in ("attention_bias", "use_bidirectional_attention"):
        config.expect(key, False)
    fields = decoder.read(config.without("hidden_act"), head_dim=256)
    return {**fields, **GEMMA3.by_width(fields["hidden"])}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**decoder.write(spec), "hidden_act": _ACTIVATION, "attention_bias": False}


FAMILY = replace(
    LLAMA,
    model_type="gemma",
    architecture="GemmaForCausalLM",
    values={"norm_plus_one": True, "mlp": "geglu", "tied": True},
    by_width=GEMMA3.by_width,
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {"gemma-2b": size(18, 2048, 8, 1, 16384, 4e-4), "gemma-7b": size(28, 3072, 16, 16, 24576, 3e-4)},
    seq_len=8192,
    head_dim=256,
    vocab_size=256000,
    max_seq_len=8192,
    norm_eps=1e-6,
)
RELEASES = ("gemma-2b-it", "gemma-7b-it")
