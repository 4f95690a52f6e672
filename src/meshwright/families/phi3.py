"""Phi-3, Phi-4 and Phi-4-mini (Abdin et al.

2024, arXiv 2404.14219 and 2412.08905): Llama with fused weights in its folders.

Phi-4-mini rotates three quarters of each head, with LongRoPE. The key `original_max_position_embeddings` is outside of
the RoPE section. If the section has it too, the outer one counts, as in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import decoder, layers, rope
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_ORIGINAL = 4096
_DROPOUTS = ("resid_pdrop", "embd_pdrop")


def _from_config(config: HFConfig) -> dict[str, Any]:
    for key, only in {"attention_bias": False, "lm_head_bias": False, "mlp_bias": False, "full_attn_mod": 1}.items():
        config.expect(key, only)
    config.expect("interpolate_factor", 1)
    config.note_unused(decoder.NO_DROPOUT, *_DROPOUTS)
    original = config.integer("original_max_position_embeddings", default=_ORIGINAL)
    return {**decoder.read(config, share=1.0, original=original), "sliding_window": layers.read_window(config)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    keys = decoder.shortened(decoder.write(spec, share=True), spec)
    scaling = spec.longrope
    return {
        **keys,
        **(rope.write_longrope(scaling, spec.max_seq_len, keys["rope_parameters"]) if scaling else {}),
        "original_max_position_embeddings": scaling.original_max_seq_len if scaling else _ORIGINAL,
        "sliding_window": spec.sliding_window,
        **dict.fromkeys(_DROPOUTS, 0.0),
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
_LONG = {"short_factor": [1.0] * 48, "long_factor": [*map(float, LONG_FACTOR)]}
_MINI = {"rope_width": 96, "vocab_size": 200064, "max_seq_len": 131072, "sliding_window": 262144, "tied": True}
_SHORT = {"vocab_size": 32064, "max_seq_len": 4096, "sliding_window": 2047}
PRESETS = presets(
    {
        "phi3-mini-4k": size(32, 3072, 32, 32, 8192, 3e-4, head_dim=96, **_SHORT),
        "phi3-medium-4k": size(40, 5120, 40, 10, 17920, 3e-4, **_SHORT),
        "phi4-14b": size(40, 5120, 40, 10, 17920, 3e-4, vocab_size=100352, max_seq_len=16384, rope_theta=250000.0),
        "phi4-mini": size(32, 3072, 24, 8, 8192, 3e-4, longrope=_LONG, **_MINI),
    },
    seq_len=4096,
    head_dim=128,
)
RELEASES = ("phi-4", "Phi-4-mini-instruct", "Phi-3-mini-4k-instruct", "Phi-3-medium-4k-instruct")
