"""EXAONE 4 (LG AI Research 2025, arXiv 2507.11407): norms of outputs and of each query and key head; full layers have no positions.

The layers without a window rotate nothing where others have one. The presets have the dimensions of the released config files. Their
learning rates were not published: these are those of other models of like size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import (
    FULL,
    SLIDING,
    HFConfig,
    Preset,
    read_layer_types,
    read_sliding_window,
    sizes,
    whole_width,
    windowed_layers,
    written_layers,
)
from meshwright.families.llama import gated_decoder_config, gated_decoder_fields
from meshwright.families.olmo2 import OLMO2
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("attention_bias", False)
    fields, window = gated_decoder_fields(config), read_sliding_window(config, 4096)
    period, layers = config.get("sliding_window_pattern", 4), range(fields["layers"])
    if not isinstance(period, int):
        period = 0  # a word such as LLLG, beside which the types are listed
    default = [SLIDING if window and period and (layer + 1) % period else FULL for layer in layers]
    return {**fields, **_layers(read_layer_types(config, default), window)}


def _layers(types: list[str], window: int | None) -> dict[str, Any]:
    """The ModelSpec fields of layers of these types."""
    if window is not None and set(types) == {FULL}:
        raise BadInput(
            "layer_types: expected a layer with a window, or sliding_window null: a model has positions somewhere"
        )
    fields = windowed_layers(types, window)
    if "blocks" in fields:
        fields["blocks"] = {**fields["blocks"], "global": {"sliding_window": 0, "positions": "none"}}
    return fields


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**whole_width(gated_decoder_config(spec), spec), **written_layers(spec)}


FAMILY = replace(
    OLMO2,
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    values={"qk_norm": True, "input_norms": False, "output_norms": True},
    from_config=_from_config,
    to_config=_to_config,
)
_RELEASED = {"kv_heads": 8, "vocab_size": 102400, "rope_theta": 1_000_000.0, "norm_eps": 1e-5}
PRESETS = {
    "exaone4-1.2b": Preset(
        model={
            **sizes(30, 2048, 32, 4096),
            **_RELEASED,
            "head_dim": 64,
            "max_seq_len": 65536,
            "rope_scaling": {"factor": 16.0},
            "tied": True,
        },
        learning_rate=6e-4,
        seq_len=4096,
    ),
    "exaone4-32b": Preset(
        model={
            **sizes(64, 5120, 40, 27392),
            **_RELEASED,
            "head_dim": 128,
            "max_seq_len": 131072,
            "rope_scaling": {"factor": 16.0},
            **_layers([SLIDING, SLIDING, SLIDING, FULL], 4096),
        },
        learning_rate=1.5e-4,
        seq_len=4096,
    ),
}
