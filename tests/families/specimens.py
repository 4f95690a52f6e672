"""A small model of each family, with all mechanisms that the family adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.registry import MODEL_PRESETS
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.fp8_limits import FP8_MULTIPLE, FP8_WIDTH_KEYS
from meshwright.spec.model import ModelSpec
from tests.interop.check import EXPORTED

SPECIMENS: dict[str, ModelSpec] = {spec.family: spec for spec in reversed(EXPORTED.values())}
COUNTS = ("heads", "kv_heads", "rope_head_dim")
"""Keys of `FP8_WIDTH_KEYS` that are no sides of matmuls."""


def released(family: str) -> list[ModelSpec]:
    """The family's presets."""
    return [from_plain(ModelSpec, fields) for fields in MODEL_PRESETS.values() if fields["family"] == family]


def of_whole_tiles(spec: ModelSpec) -> ModelSpec:
    """The model with widths that matmuls in fp8 can have, and experts that two ranks can share."""
    keys = [key for key in FP8_WIDTH_KEYS if key not in COUNTS]
    widths: dict[str, Any] = {key: -(-getattr(spec, key) // FP8_MULTIPLE) * FP8_MULTIPLE for key in keys}
    if spec.kv_rank:
        widths |= {"head_dim": 2 * FP8_MULTIPLE, "rope_head_dim": FP8_MULTIPLE}
    return replace(spec, experts=spec.experts + spec.experts % 2, **widths)


def as_words(spec: ModelSpec) -> list[str]:
    """The model as overrides of a run."""
    return [f"model.{key}={_word(value)}" for key, value in to_plain(spec).items() if value not in (None, {}, [])]


def _word(value: Any) -> str:
    """A value as one writes it on a command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_word(inner)}" for key, inner in value.items() if inner is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_word, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
