"""Phi-3, Phi-4 and Phi-4-mini (Abdin et al. 2024, arXiv 2404.14219 and 2412.08905): Llama with fused projections in its folders.

Phi-4-mini rotates three quarters of each head, with LongRoPE. The presets have the dimensions of the released config files. Learning rates
were not published: these are those of other models of like size. `original_max_position_embeddings` stands outside of the RoPE section,
and wins over one in it, as in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, read_share, sizes, whole_width
from meshwright.families.llama import LLAMA, NO_DROPOUT, gated_decoder_config, gated_decoder_fields
from meshwright.spec.model import ModelSpec

_ORIGINAL, _SHARE = 4096, "partial_rotary_factor"


def _from_config(config: HFConfig) -> dict[str, Any]:
    for key in ("attention_bias", "lm_head_bias", "mlp_bias"):
        config.expect(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        config.expect(key, 1)
    config.note_unused(NO_DROPOUT, "resid_pdrop", "embd_pdrop")
    original = config.integer("original_max_position_embeddings", default=_ORIGINAL)
    fields = gated_decoder_fields(config, original=original, without_effect=frozenset({_SHARE}))
    window = None if config.get("sliding_window") is None else config.integer("sliding_window")
    return {**fields, **read_share(config, fields["head_dim"], 1.0), "sliding_window": window}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    config, scaling, share = gated_decoder_config(spec), spec.longrope, spec.rotary_dim / spec.head_dim
    if scaling is not None:
        # Older versions of transformers allow no other keys here.
        section: dict[str, Any] = {
            "type": "longrope",
            "short_factor": [*scaling.short_factor],
            "long_factor": [*scaling.long_factor],
        }
        if scaling.factor != spec.max_seq_len / scaling.original_max_seq_len:
            section["factor"] = scaling.factor
        if scaling.attention_factor:
            section["attention_factor"] = scaling.attention_factor
        config["rope_scaling"] = section
        config["rope_parameters"] |= {**section, "rope_type": "longrope"}
    config["rope_parameters"] |= {_SHARE: share}
    return {
        **whole_width(config, spec),
        _SHARE: share,
        "original_max_position_embeddings": scaling.original_max_seq_len if scaling else _ORIGINAL,
        "sliding_window": spec.sliding_window,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }


FAMILY = replace(
    LLAMA,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    modules={**LLAMA.modules, "attention.qkv": ("self_attn.qkv_proj",), "mlp.gate_up": ("mlp.gate_up_proj",)},
    from_config=_from_config,
    to_config=_to_config,
)
LONG_FACTOR = [
    *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898),
    *(2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424),
    *(6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252),
    *(16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23),
    *(32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
]
_14B = {**sizes(40, 5120, 40, 17920), "kv_heads": 10, "head_dim": 128}
PRESETS = {
    "phi3-mini-4k": Preset(
        model={
            **sizes(32, 3072, 32, 8192),
            "kv_heads": 32,
            "head_dim": 96,
            "vocab_size": 32064,
            "max_seq_len": 4096,
            "sliding_window": 2047,
        },
        learning_rate=3e-4,
        seq_len=4096,
    ),
    "phi3-medium-4k": Preset(
        model={**_14B, "vocab_size": 32064, "max_seq_len": 4096, "sliding_window": 2047},
        learning_rate=3e-4,
        seq_len=4096,
    ),
    "phi4-14b": Preset(
        model={**_14B, "vocab_size": 100352, "max_seq_len": 16384, "rope_theta": 250000.0},
        learning_rate=3e-4,
        seq_len=4096,
    ),
    "phi4-mini": Preset(
        model={
            **sizes(32, 3072, 24, 8192),
            "kv_heads": 8,
            "head_dim": 128,
            "rope_width": 96,
            "vocab_size": 200064,
            "max_seq_len": 131072,
            "sliding_window": 262144,
            "longrope": {"short_factor": [1.0] * 48, "long_factor": [*map(float, LONG_FACTOR)]},
            "tied": True,
        },
        learning_rate=3e-4,
        seq_len=4096,
    ),
}
