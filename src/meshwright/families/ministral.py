"""Ministral 8B (Mistral AI 2024): Mistral in which some layers have a sliding window and the others have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig
from meshwright.families.keys import decoder, layers
from meshwright.families.mistral import MISTRAL
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields = decoder.read(config)
    window = layers.read_window(config, 4096)
    types = layers.read_types(config, [layers.SLIDING if window else layers.FULL] * fields["layers"])
    return {**fields, **layers.windowed(types, window)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**decoder.write(spec), **layers.write_windowed(spec)}


FAMILY = replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    from_config=_from_config,
    to_config=_to_config,
)
RELEASES = ("Ministral-8B-Instruct-2410",)
