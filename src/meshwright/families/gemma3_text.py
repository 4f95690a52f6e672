"""Gemma 3, text only (Gemma Team 2025, arXiv 2503.19786): local and global layers, four norms in each layer, gated GELU.

Norms multiply by 1 + the stored weight. Local layers have a sliding window and their own rotary base. The rotation of
global layers may be scaled. The defaults of keys are those of `Gemma3TextConfig` in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import decoder, gemma, layers
from meshwright.families.keys.layers import FULL, SLIDING
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_BASES = {SLIDING: 10_000.0, FULL: 1_000_000.0}
_OUTSIDE = {SLIDING: ("rope_local_base_freq", None), FULL: ("rope_theta", "rope_scaling")}
"""The keys of transformers 4 for the base and the scaling of each kind of layer."""
_WINDOW = 4096
_PERIOD = "sliding_window_pattern"


def _from_config(config: HFConfig) -> dict[str, Any]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := config.get(key)) is not None:
            raise config.error(key, cap, "null: Gemma 3 has no caps")
    fields = gemma.read(config, vocab_size=262_208, max_seq_len=131_072)
    ropes = layers.ropes_by_kind(config, _OUTSIDE, _BASES, longest=131_072)
    period = config.integer(_PERIOD, f"_{_PERIOD}", default=6)  # transformers 5 writes the second name.
    types = layers.read_types(config, layers.periodic(fields["layers"], period))
    return {**fields, **layers.rotated(types, config.integer("sliding_window", default=_WINDOW), ropes)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    kinds = layers.write_rotated(spec, "a Gemma 3", _WINDOW, _BASES)
    kinds["rope_local_base_freq"] = kinds["rope_parameters"][SLIDING]["rope_theta"]
    return {**gemma.write(spec), "attn_logit_softcapping": None, "final_logit_softcapping": None, **kinds}


FAMILY = GEMMA3 = replace(
    LLAMA,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    score_class="Gemma3TextForSequenceClassification",
    modules={
        **LLAMA.modules,
        **decoder.HEAD_NORMS,
        # In Llama, this is the name of the norm before the feed-forward network.
        "attention_output_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_output_norm": ("post_feedforward_layernorm",),
    },
    values={"qk_norm": True, "norm_plus_one": True, "output_norms": True, "mlp": "geglu", "tied": True},
    by_width=gemma.by_width,
    without_effect=frozenset({"cache_implementation"}),
    from_config=_from_config,
    to_config=_to_config,
)


def _layers(window: int, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Return the ModelSpec fields of one period of layers, which the model repeats.

    `window` is in tokens, `scaling` is that of global layers.
    """
    ropes = {
        kind: {"rope_theta": base, "rope_scaling": scaling if kind == FULL else None} for kind, base in _BASES.items()
    }
    return layers.rotated(layers.periodic(6, 6), window, ropes)


_SMALL = {"vocab_size": 262_144, "max_seq_len": 32_768, **_layers(512, None)}
PRESETS = presets(
    {
        "gemma3-1b": size(26, 1152, 4, 1, 6912, 4e-4, **_SMALL),
        "gemma3-4b": size(34, 2560, 8, 4, 10240, 3e-4),
        "gemma3-12b": size(48, 3840, 16, 8, 15360, 3e-4),
        "gemma3-27b": size(62, 5376, 32, 16, 21504, 1.5e-4, head_dim=128, score_scale=168**-0.5),
    },
    seq_len=8192,
    head_dim=256,
    vocab_size=262_208,
    max_seq_len=131_072,
    norm_eps=1e-6,
    **_layers(1024, {"kind": "linear", "factor": 8.0}),
)
RELEASES = ("gemma-3-1b-it",)
