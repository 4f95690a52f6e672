"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): a sliding window in every second layer, four norms in each layer, soft caps.

Attention scores and logits have a soft cap: cap · tanh(x / cap). The defaults of keys are those of `Gemma2Config` in
transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.gemma3_text import GEMMA3
from meshwright.families.keys import gemma, layers, rope
from meshwright.spec.model import ModelSpec

_CAPS = {"score_cap": 50.0, "logit_cap": 30.0}
_CAP_KEYS = {"score_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = gemma.read(config, vocab_size=256_000, max_seq_len=8192)
    types = layers.read_types(config, layers.periodic(fields["layers"], 2))
    caps = {
        field: None if config.get(key, cap) is None else config.number(key, cap)
        for (field, key), cap in zip(_CAP_KEYS.items(), _CAPS.values(), strict=True)
    }
    window = config.integer("sliding_window", default=4096)
    return {**fields, **caps, **rope.read(config), **layers.windowed(types, window)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    caps = {key: getattr(spec, field) for field, key in _CAP_KEYS.items()}
    return {**gemma.write(spec), **caps, **rope.write(spec), **layers.write_windowed(spec)}


FAMILY = replace(
    GEMMA3,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    score_class="",
    modules={ours: theirs for ours, theirs in GEMMA3.modules.items() if not ours.endswith(("q_norm", "k_norm"))},
    values={**GEMMA3.values, "qk_norm": False, **_CAPS},
    # Released folders have more keys than the class reads.
    without_effect=frozenset({"cache_implementation", "hidden_act", "sliding_window_size"}),
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {
        "gemma2-2b": size(26, 2304, 8, 4, 9216, 4e-4, head_dim=256),
        "gemma2-9b": size(42, 3584, 16, 8, 14336, 3e-4, head_dim=256),
        "gemma2-27b": size(46, 4608, 32, 16, 36864, 1.5e-4, head_dim=128, score_scale=144**-0.5),
    },
    seq_len=8192,
    vocab_size=256_000,
    max_seq_len=8192,
    norm_eps=1e-6,
    **layers.windowed(layers.periodic(2, 2), 4096),
)
RELEASES = ("gemma-2-2b-it", "gemma-2-9b-it", "gemma-2-27b-it")
