"""Ministral 3 (Mistral AI 2026, arXiv 2601.08584), text: Mistral with YaRN, in which queries grow with their position.

The preset has the class's dimensions, which are those of the released 8B model. Released folders also read images (`model_type` mistral3);
this family is their text part as a folder of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, rope_keys, rope_section, sizes, write_scaling
from meshwright.families.llama import gated_decoder_config, gated_decoder_fields
from meshwright.families.mistral import MISTRAL
from meshwright.spec.model import ModelSpec

_GROWTH, _UNUSED = "llama_4_scaling_beta", "max_position_embeddings"
_YARN = {"factor": 16.0, "original_max_seq_len": 16384}


def _from_config(config: HFConfig) -> dict[str, Any]:
    key, section = rope_section(config)
    inside = HFConfig(section, f"{config.where}: {key}")
    fields = gated_decoder_fields(config, base=1e6, without_effect=frozenset({_GROWTH, _UNUSED}))
    if "yarn" not in fields:
        raise inside.error("rope_type", section.get("rope_type", "default"), "'yarn'")
    return {
        **fields,
        "head_dim": config.integer("head_dim", default=128),
        "query_growth": inside.number(_GROWTH),
        "sliding_window": None if config.get("sliding_window") is None else config.integer("sliding_window"),
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    section = {**write_scaling(spec.yarn), _GROWTH: spec.query_growth}
    return {**gated_decoder_config(spec), **rope_keys(spec, section), "sliding_window": spec.sliding_window}


FAMILY = replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    values={"yarn": _YARN, "query_growth": 0.1},
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = {
    "ministral3-8b": Preset(
        model={
            **sizes(34, 4096, 32, 14336),
            "kv_heads": 8,
            "head_dim": 128,
            "vocab_size": 131072,
            "max_seq_len": 262144,
            "rope_theta": 1000000.0,
            "yarn": _YARN,
        },
        learning_rate=3e-4,
        seq_len=8192,
    )
}
