"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): a window in every other layer, four norms a layer, caps of scores and logits.

The presets are as released. Their learning rates were not published: these are those of other models of like size. Defaults of keys are
those of transformers' `Gemma2Config`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from meshwright.families.format import (
    HFConfig,
    Preset,
    alternating,
    read_rope,
    sizes,
    windowed_layers,
    write_rope,
    written_layers,
)
from meshwright.families.gemma3_text import GEMMA3, layer_types, read_gemma, write_gemma
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = read_gemma(config, vocab_size=256_000, max_seq_len=8192)
    types = layer_types(config, fields["layers"], 2)
    return {
        **fields,
        "score_cap": _cap(config, "attn_logit_softcapping", 50.0),
        "logit_cap": _cap(config, "final_logit_softcapping", 30.0),
        **read_rope(config),
        **windowed_layers(types, config.integer("sliding_window", default=4096)),
    }


def _cap(config: HFConfig, key: str, default: float) -> float | None:
    return None if key in config.values and config.get(key) is None else config.number(key, default)


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        **write_gemma(spec),
        "attn_logit_softcapping": spec.score_cap,
        "final_logit_softcapping": spec.logit_cap,
        **write_rope(spec),
        **written_layers(spec),
    }


FAMILY = replace(
    GEMMA3,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    score_class="",
    modules={ours: theirs for ours, theirs in GEMMA3.modules.items() if not ours.endswith(("q_norm", "k_norm"))},
    values={**GEMMA3.values, "qk_norm": False, "score_cap": 50.0, "logit_cap": 30.0},
    # Released folders have further keys beside those that the class reads.
    without_effect=frozenset({"cache_implementation", "hidden_act", "sliding_window_size"}),
    from_config=_from_config,
    to_config=_to_config,
)


def _preset(size: dict[str, Any], kv_heads: int, head_dim: int, scalar: int, learning_rate: float) -> Preset:
    model = {
        **size,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 256_000,
        "max_seq_len": 8192,
        "norm_eps": 1e-6,
        "embedding_scale": math.sqrt(size["hidden"]),
        "score_scale": None if scalar == head_dim else scalar**-0.5,
        **windowed_layers(alternating(2), 4096),
    }
    return Preset(model=model, learning_rate=learning_rate, seq_len=8192)


PRESETS = {
    "gemma2-2b": _preset(sizes(26, 2304, 8, 9216), 4, 256, 256, 4e-4),
    "gemma2-9b": _preset(sizes(42, 3584, 16, 14336), 8, 256, 256, 3e-4),
    "gemma2-27b": _preset(sizes(46, 4608, 32, 36864), 16, 128, 144, 1.5e-4),
}
