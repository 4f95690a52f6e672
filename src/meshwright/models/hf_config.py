"""Description of a model family in Hugging Face's format, and a reader of its config.json. Needs no torch.

A family is data: the names of its weights, the config keys of its dimensions, and the ModelSpec fields that its
architecture fixes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.spec.errors import BadInput, nearest, shorten
from meshwright.spec.fields import LARGEST_COUNT
from meshwright.spec.model import ModelSpec

DEEPSEEK_FIELDS = {
    "kv_rank": 0,
    "q_rank": 0,
    "rope_head_dim": 0,
    "value_head_dim": 0,
    "yarn": None,
    "router": "softmax",
    "expert_groups": 1,
    "groups_per_token": 1,
    "routing_scale": 1.0,
    "prediction_depth": 0,
}
"""ModelSpec fields that only DeepSeek's families can set, with the values of all others."""

LARGEST_NUMBER = 1e30
"""Most that a number of config.json may be; squares of it are within a double."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Architecture of transformers and its mapping to a ModelSpec."""

    model_type: str
    """`model_type` in config.json."""
    architecture: str
    """The class in `architectures`, with a language-model head."""
    base: str
    """Prefix of all weight names but the head's; folders of the model without a head omit it."""
    layer: str
    """Prefix of one layer's modules, with `{layer}` for its number."""
    ends: Mapping[str, str]
    """Modules outside the layers: our name → Hugging Face's."""
    modules: Mapping[str, tuple[str, ...]]
    """Modules of a layer: our name → Hugging Face's names.

    A weight that is fused only here has several names, in the order in which it concatenates theirs. A weight that is fused
    here and in Hugging Face's model has one name. Names of a weight that stacks a layer's experts contain `{expert}` for the
    expert's number.
    """
    tensors: Callable[[ModelSpec], Mapping[str, str]] = lambda spec: {}
    """Names in a layer that depend on the model or end otherwise: our name → Hugging Face's, both with `.weight` or the like."""
    transposed: frozenset[str] = frozenset()
    """Our modules whose weights Hugging Face stores as (in, out)."""
    unused: tuple[str, ...] = ()
    """Suffixes of tensors in old folders that are not needed (masks, rotary frequencies)."""
    predictions: Mapping[str, str] = field(default_factory=dict)
    """Modules of a prediction module outside its block, which is numbered as a further layer: our name → Hugging Face's."""
    prediction_copies: Mapping[str, str] = field(default_factory=dict)
    """Our modules at the ends of which each of these layers has a copy in folders, with the copy's name."""
    fixed: Mapping[str, Any]
    """ModelSpec fields that the architecture fixes, with their values."""
    tied: bool
    """Default of `tie_word_embeddings`."""
    from_config: Callable[[HFConfig], dict[str, Any]]
    """Converts config.json to the ModelSpec fields that are not in `fixed`."""
    to_config: Callable[[ModelSpec], dict[str, Any]]
    """Converts a ModelSpec to config.json; raises BadInput for a value that the architecture cannot express."""


@dataclass
class HFConfig:
    """Reader of config.json: every error names the file, the key and the value."""

    values: Mapping[str, Any]
    where: str
    notes: list[str] = field(default_factory=list)
    """Sentences about keys that are set but deliberately not used."""

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The positive integer of at most `LARGEST_COUNT` under the first of `keys` that is present, or `default`."""
        key, value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_COUNT:
            raise self.error(key, value, f"a positive integer of at most {LARGEST_COUNT:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The positive, finite number under `key`, or `default`."""
        key, value = self._first((key,), default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LARGEST_NUMBER:
            raise self.error(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """The boolean under `key`, or `default`."""
        key, value = self._first((key,), default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """Raise BadInput if `key` is present with a value that is not in `allowed`."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise self.error(key, value, " or ".join(map(repr, allowed)))

    def note_unused(self, why: str, *keys: str) -> None:
        """Add a note for each of `keys` that is set: its value is not used."""
        self.notes.extend(
            f"{self.where}: {key} {shorten(str(self.values[key]))} is not used: {why}"
            for key in keys
            if self.values.get(key)
        )

    def error(self, key: str, value: Any, expected: str) -> BadInput:
        """The error for a value of `key` that is not as expected."""
        return BadInput(f"{self.where}: {key}: expected {expected}, got {shorten(repr(value))}")

    def _first(self, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for key in keys:
            if self.values.get(key) is not None:
                return key, self.values[key]
        if default is None:
            near = nearest(keys[0], self.values)
            hint = f" (nearest: {near})" if near else ""
            raise BadInput(f"{self.where}: {keys[0]}: expected this key, which is missing{hint}")
        return keys[0], default


def read_rope(config: HFConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` from any of the formats that versions of transformers have written.

    Version 5 writes `rope_parameters`, which contains `rope_theta`; version 4 wrote `rope_theta` itself, and `rope_scaling` if scaled.
    """
    key, rope = rope_section(config)
    inside = HFConfig(rope, f"{config.where}: {key}")
    values = {"rope_theta": config.values.get("rope_theta"), **rope}
    theta = HFConfig(values, inside.where if "rope_theta" in rope else config.where).number("rope_theta", 10000.0)
    for section in (inside, config):
        section.expect("partial_rotary_factor", 1, 1.0)
    type_key = "type" if "type" in rope and "rope_type" not in rope else "rope_type"
    inside.expect(type_key, "default", "llama3")
    if rope.get(type_key, "default") == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    scaling = {
        "factor": inside.number("factor"),
        "low_freq_factor": inside.number("low_freq_factor"),
        "high_freq_factor": inside.number("high_freq_factor"),
        "original_max_seq_len": inside.integer(
            "original_max_position_embeddings", default=config.integer("max_position_embeddings")
        ),
    }
    return {"rope_theta": theta, "rope_scaling": scaling}


def write_rope(spec: ModelSpec) -> dict[str, Any]:
    """The keys of transformers 4 and 5. With those of version 5 alone, version 4 would silently use its default `rope_theta`."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if spec.rope_scaling is not None:
        scaling = spec.rope_scaling
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": None if spec.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": spec.rope_theta},
    }


def rope_section(config: HFConfig) -> tuple[str, Mapping[str, Any]]:
    """The key and the values of the RoPE section: `rope_parameters` (transformers 5) or `rope_scaling` (4 and before).

    A base beside the section counts as one in it. Raises BadInput if two of the places have different values for one key.
    """
    sections: dict[str, Mapping[str, Any]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.values.get(key)
        if isinstance(value, Mapping) and not any(isinstance(part, Mapping) for part in value.values()):
            sections[key] = value
        elif value is not None:
            raise config.error(key, value, "one mapping for all layers")
    first: dict[str, tuple[str, Any]] = {}
    for key, section in (*sections.items(), ("", {"rope_theta": config.values.get("rope_theta")})):
        for name, value in section.items():
            name = "rope_type" if name == "type" else name
            where = f"{key}: {name}" if key else name
            other, expected = first.setdefault(name, (where, value)) if value is not None else (where, None)
            if expected is not None and value != expected:
                raise config.error(where, value, f"{expected!r}, as {other} says, or one of the two keys alone")
    return next(iter(sections.items()), ("rope_parameters", {}))
