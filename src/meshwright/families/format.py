"""Defines what a model family is, and reads config.json.

A family has names of weights, keys of config.json, and presets. `families.keys` has keys that several families share.
In these files, "the class" is the configuration class of transformers, whose default applies if config.json lacks a
key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from meshwright.spec.errors import BadInput, nearest, shorten
from meshwright.spec.fields import LARGEST_COUNT
from meshwright.spec.model import ModelSpec

LARGEST_NUMBER = 1e30
"""Largest number that config.json may have. Its square is still within the range of a double."""


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
        # What a forward returns, and how it is divided or cached.
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
        # Sampling settings, which transformers stored here before it had generation_config.json.
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
"""Keys of config.json that do not change what a model of any family computes. Keys with a leading underscore do not either."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A released model: the dimensions in its config.json, and settings with which its training begins.

    If no learning rate was published, it is that of other models of similar size.
    """

    model: Mapping[str, Any]
    """ModelSpec fields, except the family."""
    learning_rate: float
    """Peak learning rate."""
    seq_len: int
    """Tokens of a sequence."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the section `train`."""


def size(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn_hidden: int, learning_rate: float, **other: Any
) -> dict[str, Any]:
    """Return the ModelSpec fields in which a released model differs from others of its family, and its learning rate.

    `other` has further fields.
    """
    dimensions = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn_hidden": ffn_hidden}
    return {**dimensions, "learning_rate": learning_rate, **other}


def presets(
    sizes: Mapping[str, Mapping[str, Any]], *, seq_len: int, train: Mapping[str, Any] | None = None, **shared: Any
) -> dict[str, Preset]:
    """Return the presets of a family, by name.

    `sizes` has the own fields of each preset, from `size`. `shared` has ModelSpec fields that apply to all presets
    without their own value. The other arguments are fields of Preset.
    """
    result = {}
    for name, own in sizes.items():
        model = {**own, **shared, **own}  # The model's own fields come first, also in messages.
        rate = model.pop("learning_rate")
        result[name] = Preset(model=model, learning_rate=rate, seq_len=seq_len, train=train or {})
    return result


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture of transformers, and how it maps to a ModelSpec."""

    model_type: str
    """`model_type` in config.json. It is also the family's name in run files."""
    architecture: str
    """The class with a language-model head, as `architectures` in config.json names it."""
    score_class: str | None = ""
    """The class with a head for a score.

    None: transformers has none. Empty: the name is that of `architecture` with the usual ending.
    """
    base: str
    """Prefix of the names of all weights except the head's. Folders of the model without a head omit it."""
    layer: str
    """Prefix of the names in one layer. `{layer}` stands for the number of the layer."""
    ends: Mapping[str, str]
    """Modules outside the layers, such as embedding and head: our name → the name in folders."""
    modules: Mapping[str, tuple[str, ...]]
    """Modules of a layer: our name → the names in folders.

    There are four cases:

    - Several names: our weight concatenates the weights of these names, in this order.
    - One name: the weight is the same in folders. It may be fused in both.
    - Names with `{expert}`: our weight stacks the experts of a layer, and a folder has one tensor for each expert's
      number.
    - One name for experts without `{expert}`: folders stack the experts too. The tensor has exactly this name; no
      `.weight` is added.
    """
    tensors: Callable[[ModelSpec], Mapping[str, str]] = lambda spec: {}
    """Further names in a layer, which depend on the model or have other endings: our name → the name in folders, both in full."""
    transposed: frozenset[str] = frozenset()
    """Our modules whose weights folders store as (in, out), or (experts, in, out) for stacked experts."""
    one_row: frozenset[str] = frozenset()
    """Our vectors that folders store as a matrix of one row."""
    interleaved: frozenset[str] = frozenset()
    """Our modules with gate and up projection whose outputs alternate in folders: gate 0, up 0, gate 1, …"""
    unused: tuple[str, ...] = ()
    """Suffixes of tensors in old folders that are not needed, such as masks and rotary frequencies."""
    unread: tuple[str, ...] = ()
    """Prefixes of modules in folders that are not read, such as modules for further tokens in another form than DeepSeek's."""
    predictions: Mapping[str, str] = field(default_factory=dict)
    """Parts of a module that predicts a further token, other than its block: our name → the name in folders.

    The module is numbered as a further layer in folders.
    """
    prediction_copies: Mapping[str, str] = field(default_factory=dict)
    """Our modules `embed` and `head`, if folders have a copy in each layer that predicts a further token → the copy's name."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """ModelSpec fields of this architecture that differ from the defaults of ModelSpec."""
    by_width: Callable[[int], Mapping[str, Any]] = lambda hidden: {}
    """Further such fields, computed from `hidden`."""
    required: tuple[str, ...] = ()
    """ModelSpec fields that a run must give, in addition to those of every model."""
    without_effect: frozenset[str] = frozenset()
    """Keys of config.json that do not change what the model computes, in addition to `WITHOUT_EFFECT`."""
    from_config: Callable[[HFConfig], dict[str, Any]]
    """Converts config.json to ModelSpec fields. Fields that it leaves out have the value in `values`, or ModelSpec's default."""
    to_config: Callable[[ModelSpec], dict[str, Any]]
    """Converts a ModelSpec to config.json. It may leave out values that the architecture cannot express.

    An export is refused if reading the result would give another model. Raises BadInput if no config.json can be
    written.
    """

    @property
    def scorer(self) -> str | None:
        """The class with a head for a score. None if transformers has none."""
        usual = f"{self.architecture.removesuffix('ForCausalLM')}ForSequenceClassification"
        return usual if self.score_class == "" else self.score_class


@dataclass
class HFConfig:
    """Reads the keys of a config.json. Every error names the file, the key and the value."""

    values: Mapping[str, Any]
    where: str
    """Name of the file in messages."""
    notes: list[str] = field(default_factory=list)
    """Sentences about keys that are set but deliberately not used."""
    read: set[str] = field(default_factory=set)
    """Keys that were read."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under `key`, without any check. `default` if the key is absent."""
        self.read.add(key)
        return self.values.get(key, default)

    def refuse_unknown(self, without_effect: frozenset[str] = frozenset()) -> None:
        """Raise BadInput for the first key that has a value, was not read, and is not in `without_effect`."""
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
        """Return a reader without these keys, which the caller reads itself. Keys that one of the two readers reads count for both."""
        return replace(self, values={key: value for key, value in self.values.items() if key not in keys})

    def integer(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """Return the integer under the first of `keys` that is present, otherwise `default`.

        It must be from `least` to `LARGEST_COUNT`.

        Raises BadInput if the value is invalid, and if the keys are absent and there is no default.
        """
        key, value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_COUNT:
            kind = "a positive integer" if least == 1 else f"an integer from {least}"
            raise self.error(key, value, f"{kind} of at most {LARGEST_COUNT:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the positive, finite number under `key`, otherwise `default`. Raises BadInput as `integer` does."""
        key, value = self._first((key,), default)
        if not is_positive(value):
            raise self.error(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean under `key`, otherwise `default`. Raises BadInput if the value is not a boolean."""
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
        """For each of `keys` that is set, add a note that its value is not used. `why` is the reason."""
        self.read.update(keys)
        self.notes.extend(
            f"{self.where}: {key} {shorten(str(self.values[key]))} is not used: {why}"
            for key in keys
            if self.values.get(key)
        )

    def error(self, key: str, value: Any, expected: str) -> BadInput:
        """Return the error for a value of `key` that is not as expected."""
        return BadInput(f"{self.where}: {key}: expected {expected}, got {shorten(repr(value))}")

    def _first(self, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        """Return the first of `keys` that is present, with its value; otherwise the first key with `default`.

        Raises BadInput if none is present and there is no default.
        """
        self.read.update(keys)
        for key in keys:
            if self.values.get(key) is not None:
                return key, self.values[key]
        if default is None:
            near = nearest(keys[0], self.values)
            hint = f" (nearest: {near})" if near else ""
            raise BadInput(f"{self.where}: {keys[0]}: expected this key, which is missing{hint}")
        return keys[0], default


def is_positive(value: Any) -> bool:
    """Return whether a value is a number above 0 and at most `LARGEST_NUMBER`."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value <= LARGEST_NUMBER


class Key(NamedTuple):
    """A key of config.json that corresponds to one field of ModelSpec."""

    name: str
    default: bool | int | float | None = None
    """The default of the class. Its type is the type of the field. None: the key must be present, and is an integer."""
    other: str = ""
    """Another name that some folders use for the key."""
    least: int = 1
    """Smallest value, if it is an integer."""


@dataclass(frozen=True)
class ConfigKeys:
    """Keys of config.json that are read and written by one table."""

    fields: Mapping[str, Key] = field(default_factory=dict)
    """Keys that correspond to a ModelSpec field, by the field's name."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys that have the same value in all models of the family. A folder with another value is refused."""

    def read(self, config: HFConfig) -> dict[str, Any]:
        """Return the ModelSpec fields. Raises BadInput for an invalid value, and for another value than the fixed one."""
        for key, value in self.fixed.items():
            config.expect(key, value)
        return {name: _read_key(config, key) for name, key in self.fields.items()}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the keys with their values."""
        return {**{key.name: getattr(spec, name) for name, key in self.fields.items()}, **self.fixed}


def _read_key(config: HFConfig, key: Key) -> bool | int | float:
    if isinstance(key.default, bool):
        return config.flag(key.name, key.default)
    if isinstance(key.default, float):
        return config.number(key.name, key.default)
    return config.integer(*filter(None, (key.name, key.other)), default=key.default, least=key.least)
