"""EXAONE 4 (LG AI Research 2025, arXiv 2507.11407): norms of outputs, and a norm of each query and key head.

If some layers have a sliding window, the layers without a window have no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import decoder, layers
from meshwright.families.olmo2 import OLMO2
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

_FULL = {"positions": "none"}
"""Fields of layers without a window in a model that has both kinds."""


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("attention_bias", False)
    fields = decoder.read(config)
    window = layers.read_window(config, 4096)
    period = config.get("sliding_window_pattern", 4)
    if window is None or not isinstance(period, int):
        period = 1  # There is no window, or the pattern is a word such as LLLG; with a word, the types are listed too.
    types = layers.read_types(config, layers.periodic(fields["layers"], period or 1))
    if window is not None and set(types) == {layers.FULL}:
        raise BadInput(
            "layer_types: expected a layer with a window, or sliding_window null: a model has positions somewhere"
        )
    return {**fields, **layers.windowed(types, window, **_FULL)}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    return {**decoder.shortened(decoder.write(spec), spec), **layers.write_windowed(spec)}


FAMILY = replace(
    OLMO2,
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    values={"qk_norm": True, "input_norms": False, "output_norms": True},
    from_config=_from_config,
    to_config=_to_config,
)
_WINDOWED = {"head_dim": 128, "max_seq_len": 131072, **layers.windowed(layers.periodic(4, 4), 4096, **_FULL)}
PRESETS = presets(
    {
        "exaone4-1.2b": size(30, 2048, 32, 8, 4096, 6e-4, head_dim=64, max_seq_len=65536, tied=True),
        "exaone4-32b": size(64, 5120, 40, 8, 27392, 1.5e-4, **_WINDOWED),
    },
    seq_len=4096,
    vocab_size=102400,
    rope_theta=1_000_000.0,
    rope_scaling={"factor": 16.0},
    norm_eps=1e-5,
)
RELEASES = ("EXAONE-4.0-1.2B", "EXAONE-4.0-32B")
