"""Ministral 8B (Mistral AI 2024): Mistral in which some layers have a window and the others none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import (
    FULL,
    SLIDING,
    HFConfig,
    read_layer_types,
    read_sliding_window,
    windowed_layers,
    written_layers,
)
from meshwright.families.llama import gated_decoder_config, gated_decoder_fields
from meshwright.families.mistral import MISTRAL
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    fields, window = gated_decoder_fields(config), read_sliding_window(config, 4096)
    types = read_layer_types(config, [SLIDING if window else FULL] * fields["layers"])
    return {**fields, **windowed_layers(types, window)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**gated_decoder_config(spec), **written_layers(spec)}


FAMILY = replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    from_config=_from_config,
    to_config=_to_config,
)
