"""Keys of config.json for layers of different kinds: with or without a sliding window, and with equal or different rotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.families.format import HFConfig
from meshwright.families.keys.rope import scaling_fields, write_scaling
from meshwright.spec.block_pattern import shortest_pattern
from meshwright.spec.blocks.attention import AttentionSpec
from meshwright.spec.blocks.positions import LongRopeScaling, RotarySpec
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

SLIDING = "sliding_attention"
"""Name of a layer with a sliding window in transformers."""
FULL = "full_attention"
"""Name of a layer without a sliding window in transformers."""


NAMES = {SLIDING: "local", FULL: "global"}
"""Our names of these kinds of layers."""


def periodic(layers: int, period: int) -> list[str]:
    """Return the types of `layers` layers, where each `period`-th layer has no window.

    Example: 4 layers, period 2: sliding, full, sliding, full.
    """
    return [SLIDING if (layer + 1) % period else FULL for layer in range(layers)]


def read_types(config: HFConfig, default: list[str]) -> list[str]:
    """Return the type of each layer from `layer_types`. If the key is absent, `default`, which must have one entry for each layer."""
    types = config.get("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != len(default) or not {SLIDING, FULL}.issuperset(types):
        raise config.error("layer_types", types, f"a list of {len(default)} times {SLIDING} or {FULL}")
    return types


def read_window(config: HFConfig, default: int | None = None) -> int | None:
    """Return the value of `sliding_window`; None for null. If the key is absent, `default`, which is that of the class."""
    return None if config.get("sliding_window", default) is None else config.integer("sliding_window", default=default)


def windowed(types: list[str], window: int | None, **full: Any) -> dict[str, Any]:
    """Return the ModelSpec fields of layers of these types.

    If the model has both types, the layers without a window have the fields `full` in addition; otherwise all layers
    are alike.
    """
    if window is None or len(set(types)) == 1:
        return {"sliding_window": window if types[0] == SLIDING else None}
    return {
        "sliding_window": window,
        "blocks": {"local": {}, "global": {"sliding_window": 0, **full}},
        "pattern": list(shortest_pattern([NAMES[kind] for kind in types])),
    }


def of_kinds(names: list[str], kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ModelSpec fields of layers with these kinds, by name. `kinds` has the fields of each kind.

    The result is empty if all layers are of one kind without fields.
    """
    used = {name: kinds[name] for name in dict.fromkeys(names)}
    return {"blocks": used, "pattern": list(shortest_pattern(names))} if len(used) > 1 or any(used.values()) else {}


def read_rotated_layers(config: HFConfig, layers: int, interval: int) -> list[bool]:
    """Return whether each layer has rotary positions. By default all have except every `interval`-th."""
    interval = config.integer("no_rope_layer_interval", default=interval)
    rotated = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or not {0, 1}.issuperset(rotated):
        raise config.error("no_rope_layers", rotated, f"a list of at least {layers} times 1 or 0")
    return [bool(value) for value in rotated[:layers]]


def write_rotated_layers(spec: ModelSpec) -> dict[str, Any]:
    """Return the key that `read_rotated_layers` reads, with one entry for each layer."""
    return {"no_rope_layers": [int(spec.block(layer).mixer.rotary is not None) for layer in range(spec.layers)]}


def write_windowed(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys that `windowed` needs: the type of each layer, and the window."""
    windows = [spec.block(layer).mixer.window for layer in range(spec.layers)]
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
    }


def ropes_by_kind(
    config: HFConfig,
    outside: Mapping[str, tuple[str, str | None]],
    bases: Mapping[str, float],
    *,
    longest: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Return `rope_theta` and the scaling of each kind of layer.

    - `outside`: for each kind, the keys for its base and its scaling in transformers 4. Version 5 has a section for
      each kind in `rope_parameters`. If a folder has both, they must agree.
    - `bases`: for each kind, the base of the class.
    - `longest`: default of the class for the longest sequence.
    """
    sections = config.get("rope_parameters") or {}
    if not isinstance(sections, Mapping) or not set(sections) <= {SLIDING, FULL}:
        raise config.error("rope_parameters", sections, f"mappings by kind of layer: {SLIDING} and {FULL}")
    longest = config.integer("max_position_embeddings", default=longest)
    ropes = {}
    for kind, (base_key, scaling_key) in outside.items():
        section = sections.get(kind)
        where = f"{config.where}: rope_parameters: {kind}"
        if section is not None and not isinstance(section, Mapping):
            raise config.error(f"rope_parameters: {kind}", section, "a mapping")
        inside = HFConfig(section or {}, where)
        base = config.number(base_key, inside.number("rope_theta", bases[kind]))
        if section and inside.number("rope_theta", base) != base:
            raise config.error(base_key, base, f"{inside.get('rope_theta')!r}, as rope_parameters: {kind} says")
        scaling = scaling_fields(inside, longest)
        older = config.get(scaling_key) if scaling_key else None
        if older is not None:
            if not isinstance(older, Mapping):
                raise config.error("rope_scaling", older, "a mapping")
            found = scaling_fields(HFConfig(older, f"{config.where}: rope_scaling"), longest)
            if section and found != scaling:
                raise config.error("rope_scaling", older, f"the scaling that rope_parameters: {kind} has")
            scaling = found
        ropes[kind] = {"rope_theta": base, **scaling}
    return ropes


def rotated(types: list[str], window: int, ropes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ModelSpec fields of layers whose types have different rotations. If all layers are of one type, no kinds are needed."""
    windows = {SLIDING: window, FULL: 0}  # In a kind, 0 switches off the window that the model has.
    if len(set(types)) == 1:
        return {"sliding_window": windows[types[0]] or None, **ropes[types[0]]}
    return {
        "sliding_window": window,
        "rope_theta": ropes[SLIDING]["rope_theta"],
        "blocks": {
            "local": {key: value for key, value in ropes[SLIDING].items() if key != "rope_theta"},
            "global": {"sliding_window": 0, **ropes[FULL]},
        },
        "pattern": list(shortest_pattern([NAMES[kind] for kind in types])),
    }


def write_rotated(spec: ModelSpec, folder: str, window: int, bases: Mapping[str, float]) -> dict[str, Any]:
    """Return the keys for windows and rotations of both kinds of layers.

    `folder` is the kind of folder in messages. `window` and `bases` are defaults of the class, for a kind without
    layers. Raises BadInput if the layers do not form these two kinds.
    """
    mixers = [spec.block(layer).mixer for layer in range(spec.layers)]
    types = [FULL if mixer.window is None else SLIDING for mixer in mixers]
    of_kind: dict[str, AttentionSpec] = {}
    for mixer, kind in zip(mixers, types, strict=True):
        if not isinstance(mixer, AttentionSpec) or mixer.rotary is None or of_kind.setdefault(kind, mixer) != mixer:
            raise BadInput(
                f"model.blocks: {folder} folder holds two kinds of layers, with one sliding window and without; layers of "
                "a kind must have equal attention, with rotary positions"
            )
    ropes = {
        kind: _rope(of_kind[kind].rotary if kind in of_kind else None, bases[kind], folder) for kind in (SLIDING, FULL)
    }
    scaled = ropes[FULL]["rope_type"] != "default"
    return {
        "sliding_window": of_kind[SLIDING].window if SLIDING in of_kind else window,
        "layer_types": types,
        "rope_theta": ropes[FULL]["rope_theta"],
        "rope_scaling": {key: value for key, value in ropes[FULL].items() if key != "rope_theta"} if scaled else None,
        "rope_parameters": ropes,
    }


def _rope(rotary: RotarySpec | None, base: float, folder: str) -> dict[str, Any]:
    """Return the section of a kind of layer in `rope_parameters`. If no layer is of the kind, `base` is used."""
    if rotary is None:
        return {"rope_type": "default", "rope_theta": base}
    scaling = rotary.scaling
    if isinstance(scaling, LongRopeScaling):
        raise BadInput(f"model.longrope: {folder} folder has no LongRoPE scaling")
    return {**write_scaling(scaling), "rope_theta": rotary.base}


def read_common_window(config: HFConfig, layers: int) -> int | None:
    """Return the sliding window of all layers; None if there is none. Raises BadInput if only some layers have a window."""
    first = config.get("max_window_layers", 28)
    listed = config.get("layer_types")
    types = listed or [FULL if layer < first else SLIDING for layer in range(layers)]
    if not config.flag("use_sliding_window", False) or set(types) == {FULL}:
        config.get("sliding_window")
        return None
    if set(types) != {SLIDING}:
        key = "layer_types" if listed else "max_window_layers"
        expected = "the same attention in all layers: this decoder has a sliding window in every layer or in none"
        raise config.error(key, config.get(key), expected)
    return config.integer("sliding_window", default=4096)


def write_common_window(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys that `read_common_window` reads."""
    sliding = spec.sliding_window is not None
    return {
        "use_sliding_window": sliding,
        "sliding_window": spec.sliding_window,
        "max_window_layers": 0 if sliding else spec.layers,
        "layer_types": [SLIDING if sliding else FULL] * spec.layers,
    }


def read_alternating(config: HFConfig, layers: int) -> dict[str, Any]:
    """Return the ModelSpec fields for the windows of Qwen2-MoE.

    Without `layer_types`, every second layer before layer `max_window_layers` has a window. This differs from Qwen2,
    where the layers from that number on have one.
    """
    used = config.flag("use_sliding_window", False)
    last = config.get("max_window_layers", 28)
    types = [SLIDING if used and layer % 2 == 0 and layer < last else FULL for layer in range(layers)]
    if used and config.get("layer_types") is not None:
        types = read_types(config, types)
    config.read.update(("layer_types", "sliding_window"))
    return windowed(types, config.integer("sliding_window", default=4096) if used else 0)


def write_alternating(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys that `read_alternating` reads."""
    keys = write_windowed(spec)
    return {**keys, "use_sliding_window": keys["sliding_window"] is not None, "max_window_layers": spec.layers}
