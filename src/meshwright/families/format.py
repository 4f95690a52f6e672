"""What a model family is: names of its weights, keys of its config.json, and presets; and a reader of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.spec.block_pattern import shortest_pattern
from meshwright.spec.errors import BadInput, nearest, shorten
from meshwright.spec.fields import LARGEST_COUNT
from meshwright.spec.model import ModelSpec, RopeScaling, YarnScaling

LARGEST_NUMBER = 1e30
"""Most that a number of config.json may be; squares of it are within a double."""


WITHOUT_EFFECT = frozenset(
    {
        # About the file, the program that wrote it, and how weights are stored or loaded.
        "architectures",
        "auto_map",
        "dtype",
        "model_type",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        # What a forward returns, and how it is split or cached.
        "chunk_size_feed_forward",
        "ep_size",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pretraining_tp",
        "return_dict",
        "tf_legacy_loss",
        "torchscript",
        "use_cache",
        # The tokenizer and its special tokens (`data.text_format`), and tasks other than text generation.
        "bos_token_id",
        "classifier_dropout",
        "decoder_start_token_id",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "is_decoder",
        "label2id",
        "model_max_length",
        "num_labels",
        "pad_token_id",
        "prefix",
        "problem_type",
        "pruned_heads",
        "sep_token_id",
        "task_specific_params",
        "tie_encoder_decoder",
        "tokenizer_class",
        # Sampling, which transformers kept here before generation_config.json.
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)
"""Keys of config.json that change nothing about what a model of any family computes; others begin with an underscore."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A released model, and the settings with which its training starts."""

    model: Mapping[str, Any]
    """ModelSpec fields, without the family."""
    learning_rate: float
    seq_len: int
    train: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of `train`."""


def sizes(layers: int, hidden: int, heads: int, ffn_hidden: int) -> dict[str, Any]:
    """The ModelSpec fields in which the models of a family differ most."""
    return {"layers": layers, "hidden": hidden, "heads": heads, "ffn_hidden": ffn_hidden}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Architecture of transformers and its mapping to a ModelSpec."""

    model_type: str
    """`model_type` in config.json, and the family's name in run files."""
    architecture: str
    """The class in `architectures`, with a language-model head."""
    score_class: str | None = ""
    """The class with a score in place of that head; None if transformers has none, empty: `architecture` with the usual ending."""
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
    expert's number; without it the folder stacks them too, in a tensor of this name without `.weight`.
    """
    tensors: Callable[[ModelSpec], Mapping[str, str]] = lambda spec: {}
    """Names in a layer that depend on the model or end otherwise: our name → Hugging Face's, both with `.weight` or the like."""
    transposed: frozenset[str] = frozenset()
    """Our modules whose weights Hugging Face stores as (in, out); of stacked experts as (experts, in, out)."""
    interleaved: frozenset[str] = frozenset()
    """Our modules of gates and ups whose outputs alternate in folders: gate 0, up 0, gate 1, …"""
    unused: tuple[str, ...] = ()
    """Suffixes of tensors in old folders that are not needed (masks, rotary frequencies)."""
    predictions: Mapping[str, str] = field(default_factory=dict)
    """Modules of a prediction module outside its block, which is numbered as a further layer: our name → Hugging Face's."""
    prediction_copies: Mapping[str, str] = field(default_factory=dict)
    """Our modules at the ends of which each of these layers has a copy in folders, with the copy's name."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """ModelSpec fields of the architecture that differ from the defaults of ModelSpec."""
    by_width: Callable[[int], Mapping[str, Any]] = lambda hidden: {}
    """Further such fields, which follow from `hidden`."""
    required: tuple[str, ...] = ()
    """ModelSpec fields that a run must give beside those of every model."""
    without_effect: frozenset[str] = frozenset()
    """Keys of config.json, beside those of `WITHOUT_EFFECT`, that change nothing about what the model computes."""
    from_config: Callable[[HFConfig], dict[str, Any]]
    """Converts config.json to ModelSpec fields; those that it leaves out have the values of `values` or ModelSpec."""
    to_config: Callable[[ModelSpec], dict[str, Any]]
    """Converts a ModelSpec to config.json. Values that the architecture cannot express may be left out.

    An export is refused unless reading the result gives the same model. Raises BadInput where nothing can be written.
    """

    @property
    def scorer(self) -> str | None:
        """The class with a score."""
        usual = f"{self.architecture.removesuffix('ForCausalLM')}ForSequenceClassification"
        return usual if self.score_class == "" else self.score_class


@dataclass
class HFConfig:
    """Reader of config.json: every error names the file, the key and the value."""

    values: Mapping[str, Any]
    where: str
    notes: list[str] = field(default_factory=list)
    """Sentences about keys that are set but deliberately not used."""
    read: set[str] = field(default_factory=set)
    """Keys that were asked for."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value under `key`, unchecked; `default` if it is absent."""
        self.read.add(key)
        return self.values.get(key, default)

    def refuse_unknown(self, without_effect: frozenset[str] = frozenset()) -> None:
        """Raise BadInput for the first key with a value that was not asked for and is not in `without_effect`."""
        known = self.read | without_effect
        for key, value in self.values.items():
            if key not in known and not key.startswith("_") and value is not None:
                near = nearest(key, self.read)
                hint = f" (nearest: {near})" if near else ""
                raise BadInput(
                    f"{self.where}: {key}: expected a key that this family reads, got {shorten(repr(value))}, which may "
                    f"change what the model computes{hint}; remove the key if it does not"
                )

    def without(self, *keys: str) -> HFConfig:
        """The same without some keys, which the caller reads; what is read of either counts for both."""
        return replace(self, values={key: value for key, value in self.values.items() if key not in keys})

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The positive integer of at most `LARGEST_COUNT` under the first of `keys` that is present, or `default`."""
        key, value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_COUNT:
            raise self.error(key, value, f"a positive integer of at most {LARGEST_COUNT:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The positive, finite number under `key`, or `default`."""
        key, value = self._first((key,), default)
        if not _is_positive(value):
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
        value = self.get(key)
        if value is not None and value not in allowed:
            raise self.error(key, value, " or ".join(map(repr, allowed)))

    def note_unused(self, why: str, *keys: str) -> None:
        """Add a note for each of `keys` that is set: its value is not used."""
        self.read.update(keys)
        self.notes.extend(
            f"{self.where}: {key} {shorten(str(self.values[key]))} is not used: {why}"
            for key in keys
            if self.values.get(key)
        )

    def error(self, key: str, value: Any, expected: str) -> BadInput:
        """The error for a value of `key` that is not as expected."""
        return BadInput(f"{self.where}: {key}: expected {expected}, got {shorten(repr(value))}")

    def _first(self, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        self.read.update(keys)
        for key in keys:
            if self.values.get(key) is not None:
                return key, self.values[key]
        if default is None:
            near = nearest(keys[0], self.values)
            hint = f" (nearest: {near})" if near else ""
            raise BadInput(f"{self.where}: {keys[0]}: expected this key, which is missing{hint}")
        return keys[0], default


SLIDING, FULL = "sliding_attention", "full_attention"
"""transformers' names of layers with a sliding window and without."""


def alternating(layers: int) -> list[str]:
    """The types of layers of which every other one has a window, the first included."""
    return [FULL if layer % 2 else SLIDING for layer in range(layers)]


def read_layer_types(config: HFConfig, default: list[str]) -> list[str]:
    """The type of each layer under `layer_types`, or `default`, which has as many."""
    types = config.get("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != len(default) or not {SLIDING, FULL}.issuperset(types):
        raise config.error("layer_types", types, f"a list of {len(default)} times {SLIDING} or {FULL}")
    return types


def read_sliding_window(config: HFConfig, default: int) -> int | None:
    """`sliding_window` of a class in which a missing key is `default` and null is no window."""
    return None if config.get("sliding_window", default) is None else config.integer("sliding_window", default=default)


def windowed_layers(types: list[str], window: int | None) -> dict[str, Any]:
    """The ModelSpec fields of layers of these types that differ in nothing but their window; without one all are alike."""
    if window is None or len(set(types)) == 1:
        return {"sliding_window": window if types[0] == SLIDING else None}
    names = {SLIDING: "local", FULL: "global"}
    return {
        "sliding_window": window,
        "blocks": {"local": {}, "global": {"sliding_window": 0}},
        "pattern": list(shortest_pattern([names[kind] for kind in types])),
    }


def written_layers(spec: ModelSpec) -> dict[str, Any]:
    """The config.json keys of `windowed_layers`."""
    windows = [spec.block(layer).mixer.window for layer in range(spec.layers)]
    return {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
    }


SECTION_KEYS = frozenset({"rope_theta", "rope_type", "type"})
"""Keys that every RoPE section may have."""


def read_rope(
    config: HFConfig, *, base: float = 10000.0, original: int = 0, without_effect: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """`rope_theta` and the scaling from any of the formats that versions of transformers have written.

    Version 5 writes `rope_parameters`, which contains `rope_theta`; version 4 wrote `rope_theta` itself, and `rope_scaling` if scaled.
    `base` is that of the class, for a folder without one; `original` the original context of LongRoPE, in families that have it;
    `without_effect` has further keys of the section that the caller reads.
    """
    key, rope = rope_section(config)
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
    """`rope_scaling` or `yarn` of a RoPE section; `max_positions` as in `read_scaling`."""
    if (section.get("rope_type") or section.get("type")) == "yarn":
        return {"yarn": read_yarn(section, max_positions, without_effect)}
    return {"rope_scaling": read_scaling(section, max_positions, without_effect)}


LONGROPE = ("longrope", "su", "yarn")
"""Names of LongRoPE in config.json of Phi-3, which has no other scaling."""


def read_longrope(
    section: HFConfig, max_positions: int, original: int, without_effect: frozenset[str]
) -> dict[str, Any]:
    """The fields of a LongRopeScaling in a RoPE section; the scaled context is `max_positions` long if the section does not say."""
    section.expect("original_max_position_embeddings", original)
    fields: dict[str, Any] = {
        "original_max_seq_len": original,
        "factor": section.number("factor", max_positions / original),
    }
    for name in ("short_factor", "long_factor"):
        numbers = section.get(name)
        if not isinstance(numbers, list) or not all(_is_positive(number) for number in numbers):
            raise section.error(name, numbers, "a list of positive numbers")
        fields[name] = [float(number) for number in numbers]
    if section.get("attention_factor") is not None:
        fields["attention_factor"] = section.number("attention_factor")
    section.refuse_unknown(SECTION_KEYS | without_effect)
    return fields


def _is_positive(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value <= LARGEST_NUMBER


def read_share(config: HFConfig, head_dim: int, default: float) -> dict[str, Any]:
    """`rope_width` from the rotated share of heads in the RoPE section or beside it; `default` is that of the class."""
    key, rope = rope_section(config)
    inside = HFConfig(rope, f"{config.where}: {key}")
    share = inside.number("partial_rotary_factor", config.number("partial_rotary_factor", default))
    if share > 1:
        raise inside.error("partial_rotary_factor", share, "at most 1")
    width = int(head_dim * share)
    return {"rope_width": 0 if width == head_dim else width}


def read_yarn(section: HFConfig, max_positions: int, without_effect: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The fields of a YarnScaling in a RoPE section; `max_positions` as in `read_scaling`."""
    whole, growth = section.get("mscale_all_dim") or 0.0, section.get("mscale") or 0.0
    yarn = {
        "factor": section.number("factor"),
        "original_max_seq_len": section.integer("original_max_position_embeddings", default=max_positions),
        "beta_fast": section.number("beta_fast", 32.0),
        "beta_slow": section.number("beta_slow", 1.0),
        # Without both keys transformers lets the rotated part grow by 1, whatever the other is.
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
    """The fields of a RopeScaling in a RoPE section, or None; `max_positions` is the original context of one that does not say."""
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


def write_rope(spec: ModelSpec) -> dict[str, Any]:
    """The keys of transformers 4 and 5. With those of version 5 alone, version 4 would silently use its default `rope_theta`."""
    return rope_keys(spec, write_scaling(spec.yarn or spec.rope_scaling))


def rope_keys(spec: ModelSpec, section: dict[str, Any]) -> dict[str, Any]:
    """The keys of both versions for a RoPE section without its base."""
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": None if section["rope_type"] == "default" else section,
        "rope_parameters": {**section, "rope_theta": spec.rope_theta},
    }


def whole_width(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """`config` without `head_dim` where readers compute it, as released folders of the family do not have it."""
    return {
        key: value for key, value in config.items() if key != "head_dim" or spec.head_dim * spec.heads != spec.hidden
    }


def write_scaling(scaling: RopeScaling | YarnScaling | None) -> dict[str, Any]:
    """The keys of a RoPE section without its base."""
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


def rope_section(config: HFConfig) -> tuple[str, Mapping[str, Any]]:
    """The key and the values of the RoPE section: `rope_parameters` (transformers 5) or `rope_scaling` (4 and before).

    A base beside the section counts as one in it. Raises BadInput if two of the places have different values for one key.
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
