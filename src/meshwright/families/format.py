"""What a model family is: names of its weights, keys of its config.json, and presets; and a reader of config.json.

Keys that several families share are in `families.keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from meshwright.spec.errors import BadInput, nearest, shorten
from meshwright.spec.fields import LARGEST_COUNT
from meshwright.spec.model import ModelSpec

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
    """A released model with the dimensions of its config.json, and the settings with which its training starts.

    The learning rate is that of other models of like size, where none was published.
    """

    model: Mapping[str, Any]
    """ModelSpec fields, without the family."""
    learning_rate: float
    seq_len: int
    train: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of `train`."""


def size(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn_hidden: int, learning_rate: float, **other: Any
) -> dict[str, Any]:
    """What a released model has for itself: these ModelSpec fields and `other` ones, and its learning rate."""
    dimensions = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn_hidden": ffn_hidden}
    return {**dimensions, "learning_rate": learning_rate, **other}


def presets(
    sizes: Mapping[str, Mapping[str, Any]], *, seq_len: int, train: Mapping[str, Any] | None = None, **shared: Any
) -> dict[str, Preset]:
    """The presets of a family by name, each of a `size` and the ModelSpec fields that all have; the other arguments are those of Preset."""
    result = {}
    for name, own in sizes.items():
        model = {**own, **shared, **own}  # its own first, in messages too
        rate = model.pop("learning_rate")
        result[name] = Preset(model=model, learning_rate=rate, seq_len=seq_len, train=train or {})
    return result


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
    one_row: frozenset[str] = frozenset()
    """Our vectors that folders store as a matrix of one row."""
    interleaved: frozenset[str] = frozenset()
    """Our modules of gates and ups whose outputs alternate in folders: gate 0, up 0, gate 1, …"""
    unused: tuple[str, ...] = ()
    """Suffixes of tensors in old folders that are not needed (masks, rotary frequencies)."""
    unread: tuple[str, ...] = ()
    """Prefixes of modules in folders that the decoder does not have: predictions of another form than DeepSeek's."""
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

    def integer(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """The integer from `least` to `LARGEST_COUNT` under the first of `keys` that is present, or `default`."""
        key, value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_COUNT:
            kind = "a positive integer" if least == 1 else f"an integer from {least}"
            raise self.error(key, value, f"{kind} of at most {LARGEST_COUNT:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The positive, finite number under `key`, or `default`."""
        key, value = self._first((key,), default)
        if not is_positive(value):
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


def is_positive(value: Any) -> bool:
    """Whether a value is a positive number, and small enough to be meant."""
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value <= LARGEST_NUMBER


class Key(NamedTuple):
    """A key of config.json that is a field of ModelSpec."""

    name: str
    default: bool | int | float | None = None
    """The value of the class for a config.json without the key, whose type the field has; None if it must be there, for integers."""
    other: str = ""
    """Another name that folders have for it."""
    least: int = 1
    """Least value of an integer."""


@dataclass(frozen=True)
class ConfigKeys:
    """Keys of config.json that are read and written alike."""

    fields: Mapping[str, Key] = field(default_factory=dict)
    """Those of ModelSpec fields."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Those that have one value in all models of the family: a folder with another one is refused."""

    def read(self, config: HFConfig) -> dict[str, Any]:
        """The ModelSpec fields. Raises BadInput for a value that is none of the field, or not the fixed one."""
        for key, value in self.fixed.items():
            config.expect(key, value)
        return {name: _read_key(config, key) for name, key in self.fields.items()}

    def write(self, spec: ModelSpec) -> dict[str, Any]:
        """The keys with their values."""
        return {**{key.name: getattr(spec, name) for name, key in self.fields.items()}, **self.fixed}


def _read_key(config: HFConfig, key: Key) -> bool | int | float:
    if isinstance(key.default, bool):
        return config.flag(key.name, key.default)
    if isinstance(key.default, float):
        return config.number(key.name, key.default)
    return config.integer(*filter(None, (key.name, key.other)), default=key.default, least=key.least)
