"""Keys for RoPE: base, scaling, and rotated fraction of each head, in the formats of all versions of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, is_positive
from meshwright.spec.blocks.positions import LongRopeScaling
from meshwright.spec.model import ModelSpec, RopeScaling, YarnScaling

SECTION_KEYS = frozenset({"rope_theta", "rope_type", "type"})
"""Keys that every RoPE section may have."""


def read(
    config: HFConfig, *, base: float = 10000.0, original: int = 0, without_effect: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return `rope_theta` and the scaling, from any format that a version of transformers has written.

    Version 5 writes a section `rope_parameters`, which contains `rope_theta`. Version 4 wrote `rope_theta` itself, and
    a section `rope_scaling` if positions are scaled.

    - `base`: default of the class.
    - `original`: original context length of LongRoPE, in families that have it; 0 in others.
    - `without_effect`: further keys of the section, which the caller reads.
    """
    key, rope = section_of(config)
    inside = HFConfig(rope, f"{config.where}: {key}")
    values = {"rope_theta": config.get("rope_theta"), **rope}
    theta = HFConfig(values, inside.where if "rope_theta" in rope else config.where).number("rope_theta", base)
    if "partial_rotary_factor" not in without_effect:
        for section in (inside, config):
            section.expect("partial_rotary_factor", 1, 1.0)
    longest = config.integer("max_position_embeddings")
    if original and (rope.get("rope_type") or rope.get("type") or "default") != "default":
        inside.expect("rope_type" if "rope_type" in rope else "type", *LONGROPE)
        return {"rope_theta": theta, "longrope": read_longrope(inside, longest, original, without_effect)}
    return {"rope_theta": theta, **scaling_fields(inside, longest, without_effect)}


def scaling_fields(
    section: HFConfig, max_positions: int, without_effect: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the field `rope_scaling` or `yarn` of a RoPE section. `max_positions` is as in `read_scaling`."""
    if (section.get("rope_type") or section.get("type")) == "yarn":
        return {"yarn": read_yarn(section, max_positions, without_effect)}
    return {"rope_scaling": read_scaling(section, max_positions, without_effect)}


LONGROPE = ("longrope", "su", "yarn")
"""Names of LongRoPE in the config.json of Phi-3, which has no other scaling."""


def read_longrope(
    section: HFConfig, max_positions: int, original: int, without_effect: frozenset[str]
) -> dict[str, Any]:
    """Return the fields of a LongRopeScaling. If the section has no factor, it is `max_positions` divided by `original`."""
    section.expect("original_max_position_embeddings", original)
    fields: dict[str, Any] = {
        "original_max_seq_len": original,
        "factor": section.number("factor", max_positions / original),
    }
    for name in ("short_factor", "long_factor"):
        numbers = section.get(name)
        if not isinstance(numbers, list) or not all(is_positive(number) for number in numbers):
            raise section.error(name, numbers, "a list of positive numbers")
        fields[name] = [float(number) for number in numbers]
    if section.get("attention_factor") is not None:
        fields["attention_factor"] = section.number("attention_factor")
    section.refuse_unknown(SECTION_KEYS | without_effect)
    return fields


def write_longrope(scaling: LongRopeScaling, max_positions: int, section: dict[str, Any]) -> dict[str, Any]:
    """Return the keys for LongRoPE of both versions of transformers. `section` has further keys of the section in version 5."""
    # Older versions of transformers allow no other keys here.
    longrope: dict[str, Any] = {
        "type": "longrope",
        "short_factor": [*scaling.short_factor],
        "long_factor": [*scaling.long_factor],
    }
    if scaling.factor != max_positions / scaling.original_max_seq_len:
        longrope["factor"] = scaling.factor
    if scaling.attention_factor:
        longrope["attention_factor"] = scaling.attention_factor
    return {"rope_scaling": longrope, "rope_parameters": {**section, **longrope, "rope_type": "longrope"}}


def read_share(config: HFConfig, head_dim: int, default: float) -> dict[str, Any]:
    """Return `rope_width`, computed from the rotated fraction of each head. The key is in the RoPE section or next to it.

    `default` is that of the class. 0 means the whole head.
    """
    key, rope = section_of(config)
    inside = HFConfig(rope, f"{config.where}: {key}")
    share = inside.number("partial_rotary_factor", config.number("partial_rotary_factor", default))
    if share > 1:
        raise inside.error("partial_rotary_factor", share, "at most 1")
    width = int(head_dim * share)
    return {"rope_width": 0 if width == head_dim else width}


def read_yarn(section: HFConfig, max_positions: int, without_effect: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the fields of a YarnScaling. `max_positions` is as in `read_scaling`."""
    whole = section.get("mscale_all_dim") or 0.0
    growth = section.get("mscale") or 0.0
    yarn = {
        "factor": section.number("factor"),
        "original_max_seq_len": section.integer("original_max_position_embeddings", default=max_positions),
        "beta_fast": section.number("beta_fast", 32.0),
        "beta_slow": section.number("beta_slow", 1.0),
        # Unless both keys are set, transformers multiplies the rotated part by 1, whatever the other key is.
        "mscale": section.number("mscale") if whole and growth else 1.0,
        "mscale_all_dim": float(whole) if growth else 0.0,
        "truncate": section.flag("truncate", True),
    }
    if section.get("attention_factor") is not None:
        yarn["attention_factor"] = section.number("attention_factor")
    section.refuse_unknown(SECTION_KEYS | without_effect)
    return yarn


def read_scaling(
    section: HFConfig, max_positions: int, without_effect: frozenset[str] = frozenset()
) -> dict[str, Any] | None:
    """Return the fields of a RopeScaling; None without scaling.

    `max_positions` is the original context if the section does not give it.
    """
    rope = section.values
    type_key = "type" if "type" in rope and "rope_type" not in rope else "rope_type"
    section.expect(type_key, "default", "linear", "llama3")
    kind = rope.get(type_key) or "default"
    scaling = None
    if kind != "default":
        scaling = {"kind": kind, "factor": section.number("factor")}
    if scaling is not None and kind == "llama3":
        original = section.integer("original_max_position_embeddings", default=max_positions)
        scaling |= {
            "low_freq_factor": section.number("low_freq_factor"),
            "high_freq_factor": section.number("high_freq_factor"),
            "original_max_seq_len": original,
        }
    section.refuse_unknown(SECTION_KEYS | without_effect)
    return scaling


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys for transformers 4 and 5. With only those of version 5, version 4 would silently use its default `rope_theta`."""
    return in_both_versions(spec, write_scaling(spec.yarn or spec.rope_scaling))


def in_both_versions(spec: ModelSpec, section: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of both versions. `section` is the RoPE section without its base."""
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": None if section["rope_type"] == "default" else section,
        "rope_parameters": {**section, "rope_theta": spec.rope_theta},
    }


def write_scaling(scaling: RopeScaling | YarnScaling | None) -> dict[str, Any]:
    """Return the keys of a RoPE section, without its base."""
    if scaling is None:
        return {"rope_type": "default"}
    if isinstance(scaling, YarnScaling):
        growth = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            **(growth if scaling.mscale_all_dim else {}),
            **({} if scaling.truncate else {"truncate": False}),
            **({"attention_factor": scaling.attention_factor} if scaling.attention_factor else {}),
        }
    section: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        section |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return section


def section_of(config: HFConfig) -> tuple[str, Mapping[str, Any]]:
    """Return the key and the values of the RoPE section: `rope_parameters` (transformers 5) or `rope_scaling` (before).

    `rope_theta` next to the section counts as a value in it. Raises BadInput if two of these places have different
    values.
    """
    sections: dict[str, Mapping[str, Any]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, Mapping) and not any(isinstance(part, Mapping) for part in value.values()):
            sections[key] = value
        elif value is not None:
            raise config.error(key, value, "one mapping for all layers")
    first: dict[str, tuple[str, Any]] = {}
    for key, section in (*sections.items(), ("", {"rope_theta": config.get("rope_theta")})):
        for name, value in section.items():
            name = "rope_type" if name == "type" else name
            where = f"{key}: {name}" if key else name
            other, expected = first.setdefault(name, (where, value)) if value is not None else (where, None)
            if expected is not None and value != expected:
                raise config.error(where, value, f"{expected!r}, as {other} says, or one of the two keys alone")
    return next(iter(sections.items()), ("rope_parameters", {}))


def stretched_base(base: float, alpha: float, head_dim: int) -> float:
    """Return the base that results from stretching `base` by `alpha`.

    It lowers the lowest frequency to about 1 / `alpha` of its value.
    """
    return base * alpha ** (head_dim / (head_dim - 2))


def stretched(config: HFConfig, head_dim: int) -> HFConfig:
    """Return the config.json with the resulting base in place of a section of type `dynamic`, which has `alpha` in folders of Hunyuan."""
    key, section = section_of(config)
    if (section.get("rope_type") or section.get("type")) != "dynamic":
        return config
    inside = HFConfig({"rope_theta": config.get("rope_theta"), **section}, f"{config.where}: {key}")
    base = stretched_base(inside.number("rope_theta", 10000.0), inside.number("alpha"), head_dim)
    rope = {"rope_type": "default", "rope_theta": base}
    return replace(config, values={**config.values, "rope_theta": None, "rope_scaling": None, "rope_parameters": rope})
