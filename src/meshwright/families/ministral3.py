"""Ministral 3 (Mistral AI 2026, arXiv 2601.08584), text only:

Mistral with YaRN, and with queries that grow with their position.

The preset has the dimensions of the class, which are those of the released 8B model. Released folders also read images
(`model_type` mistral3); this family is their text part as a folder of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import decoder, layers, rope
from meshwright.families.mistral import MISTRAL
from meshwright.spec.model import ModelSpec

_GROWTH = "llama_4_scaling_beta"
_UNUSED = "max_position_embeddings"
_YARN = {"factor": 16.0, "original_max_seq_len": 16384}


def _from_config(config: HFConfig) -> dict[str, Any]:
    key, section = rope.section_of(config)
    inside = HFConfig(section, f"{config.where}: {key}")
    fields = decoder.read(config, head_dim=128, base=1e6, without_effect=frozenset({_GROWTH, _UNUSED}))
    if "yarn" not in fields:
        raise inside.error("rope_type", section.get("rope_type", "default"), "'yarn'")
    return {**fields, "query_growth": inside.number(_GROWTH), "sliding_window": layers.read_window(config)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    section = {**rope.write_scaling(spec.yarn), _GROWTH: spec.query_growth}
    return {**decoder.write(spec), **rope.in_both_versions(spec, section), "sliding_window": spec.sliding_window}


FAMILY = replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    values={"yarn": _YARN, "query_growth": 0.1},
    from_config=_from_config,
    to_config=_to_config,
)
PRESETS = presets(
    {"ministral3-8b": size(34, 4096, 32, 8, 14336, 3e-4)},
    seq_len=8192,
    head_dim=128,
    vocab_size=131072,
    max_seq_len=262144,
    rope_theta=1000000.0,
    yarn=_YARN,
)
RELEASES = ("Ministral-3-8B-Instruct-2512",)
