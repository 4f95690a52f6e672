"""Gemma 3, text (Gemma Team 2025, arXiv 2503.19786): local and global layers, four norms a layer, gated GELU.

Norms multiply by 1 + the stored weight. Local layers have a window and a rotary base of their own; the base of global layers may be scaled.
Presets have the dimensions of the released text models' config files (`text_config` for those that also read images). Their
learning rates were not published: these are those of other models of like size. `embedding_scale` is √hidden. Defaults of keys
are those of transformers' `Gemma3TextConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, Preset, read_layer_types, scaling_fields, sizes, write_scaling
from meshwright.families.llama import LLAMA, NO_DROPOUT
from meshwright.spec.block_pattern import shortest_pattern
from meshwright.spec.blocks.attention import AttentionSpec
from meshwright.spec.blocks.positions import LongRopeScaling, RotarySpec
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

LOCAL, GLOBAL = "sliding_attention", "full_attention"
"""transformers' names of the kinds of layers."""
NAMES = {LOCAL: "local", GLOBAL: "global"}
"""Our names of them."""
BASES = {LOCAL: 10_000.0, GLOBAL: 1_000_000.0}
WINDOW = 4096
"""The window of the class, for a config.json without `sliding_window`."""
_OUTSIDE = {LOCAL: ("rope_local_base_freq", None), GLOBAL: ("rope_theta", "rope_scaling")}
"""Keys of base and scaling that transformers 4 has beside the sections of kinds."""


def _from_config(config: HFConfig) -> dict[str, Any]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := config.get(key)) is not None:
            raise config.error(key, cap, "null: Gemma 3 has no caps")
    fields = read_gemma(config, vocab_size=262_208, max_seq_len=131_072)
    ropes = ropes_by_kind(config, _OUTSIDE, BASES, longest=131_072)
    types = layer_types(config, fields["layers"], _period(config))
    return {**fields, **kinds_of_layers(types, config.integer("sliding_window", default=WINDOW), ropes)}


def read_gemma(config: HFConfig, *, vocab_size: int, max_seq_len: int) -> dict[str, Any]:
    """The ModelSpec fields that Gemma 2 and 3 read alike, but for these defaults."""
    config.expect("hidden_activation", "gelu_pytorch_tanh")
    for key in ("attention_bias", "use_bidirectional_attention"):
        config.expect(key, False)
    config.note_unused(NO_DROPOUT, "attention_dropout")
    hidden, head_dim = config.integer("hidden_size", default=2304), config.integer("head_dim", default=256)
    scalar = config.number("query_pre_attn_scalar", 256)
    return {
        "layers": config.integer("num_hidden_layers", default=26),
        "hidden": hidden,
        "heads": config.integer("num_attention_heads", default=8),
        "kv_heads": config.integer("num_key_value_heads", default=4),
        "head_dim": head_dim,
        "ffn_hidden": config.integer("intermediate_size", default=9216),
        "vocab_size": config.integer("vocab_size", default=vocab_size),
        "max_seq_len": config.integer("max_position_embeddings", default=max_seq_len),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "init_std": config.number("initializer_range", 0.02),
        "embedding_scale": math.sqrt(hidden),
        "score_scale": None if scalar == head_dim else scalar**-0.5,
    }


def _period(config: HFConfig) -> int:
    """The last of so many layers is global, in a config.json without `layer_types`."""
    key = "sliding_window_pattern"
    if config.get(key) is None and f"_{key}" in config.values:
        key = f"_{key}"  # as transformers 5 writes it
    return config.integer(key, default=6)


def layer_types(config: HFConfig, layers: int, period: int) -> list[str]:
    """The kind of each layer; without `layer_types` the last of every `period` layers is global."""
    return read_layer_types(config, [LOCAL if (layer + 1) % period else GLOBAL for layer in range(layers)])


def ropes_by_kind(
    config: HFConfig,
    outside: Mapping[str, tuple[str, str | None]],
    bases: Mapping[str, float],
    *,
    longest: int | None = None,
) -> dict[str, dict[str, Any]]:
    """`rope_theta` and the scaling by kind of layer, from the keys of transformers 4 or 5, which must agree.

    `outside` has the keys of transformers 4 for a kind's base and scaling; `bases` and `longest`, the longest sequence, are those of the
    class.
    """
    sections = config.get("rope_parameters") or {}
    if not isinstance(sections, Mapping) or not set(sections) <= {LOCAL, GLOBAL}:
        raise config.error("rope_parameters", sections, f"mappings by kind of layer: {LOCAL} and {GLOBAL}")
    longest, ropes = config.integer("max_position_embeddings", default=longest), {}
    for kind, (base_key, scaling_key) in outside.items():
        section, where = sections.get(kind), f"{config.where}: rope_parameters: {kind}"
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


def kinds_of_layers(types: list[str], window: int, ropes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The ModelSpec fields of layers of these kinds: flat keys, or kinds in the shortest pattern."""
    windows = {LOCAL: window, GLOBAL: 0}  # 0 switches the model's window off in a kind
    if len(set(types)) == 1:
        return {"sliding_window": windows[types[0]] or None, **ropes[types[0]]}
    return {
        "sliding_window": window,
        "rope_theta": ropes[LOCAL]["rope_theta"],
        "blocks": {
            "local": {key: value for key, value in ropes[LOCAL].items() if key != "rope_theta"},
            "global": {"sliding_window": 0, **ropes[GLOBAL]},
        },
        "pattern": list(shortest_pattern([NAMES[kind] for kind in types])),
    }


def write_kinds(spec: ModelSpec, folder: str, window: int, bases: Mapping[str, float]) -> dict[str, Any]:
    """The keys of windows and rotations by kind of layer; `folder`, `window` and `bases` are the family's, for a kind without layers."""
    mixers = [spec.block(layer).mixer for layer in range(spec.layers)]
    types = [GLOBAL if mixer.window is None else LOCAL for mixer in mixers]
    of_kind: dict[str, AttentionSpec] = {}
    for mixer, kind in zip(mixers, types, strict=True):
        if not isinstance(mixer, AttentionSpec) or mixer.rotary is None or of_kind.setdefault(kind, mixer) != mixer:
            raise BadInput(
                f"model.blocks: {folder} folder holds two kinds of layers, with one sliding window and without; layers of "
                "a kind must have equal attention, with rotary positions"
            )
    ropes = {
        kind: _rope(of_kind[kind].rotary if kind in of_kind else None, bases[kind], folder) for kind in (LOCAL, GLOBAL)
    }
    scaled = ropes[GLOBAL]["rope_type"] != "default"
    return {
        "sliding_window": of_kind[LOCAL].window if LOCAL in of_kind else window,
        "layer_types": types,
        "rope_theta": ropes[GLOBAL]["rope_theta"],
        "rope_scaling": {key: value for key, value in ropes[GLOBAL].items() if key != "rope_theta"} if scaled else None,
        "rope_parameters": ropes,
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    kinds = write_kinds(spec, "a Gemma 3", WINDOW, BASES)
    return {
        **write_gemma(spec),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        **kinds,
        "rope_local_base_freq": kinds["rope_parameters"][LOCAL]["rope_theta"],
    }


def write_gemma(spec: ModelSpec) -> dict[str, Any]:
    """The config.json keys that Gemma 2 and 3 write alike."""
    return {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "initializer_range": spec.init_std,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "query_pre_attn_scalar": spec.head_dim if spec.score_scale is None else round(spec.score_scale**-2),
    }


def _rope(rotary: RotarySpec | None, base: float, folder: str) -> dict[str, Any]:
    """The section of a kind of layer in `rope_parameters`; the `base` of the class if no layer is of the kind."""
    if rotary is None:
        return {"rope_type": "default", "rope_theta": base}
    scaling = rotary.scaling
    if isinstance(scaling, LongRopeScaling):
        raise BadInput(f"model.longrope: {folder} folder has no LongRoPE scaling")
    return {**write_scaling(scaling), "rope_theta": rotary.base}


FAMILY = GEMMA3 = replace(
    LLAMA,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    score_class="Gemma3TextForSequenceClassification",
    modules={
        **LLAMA.modules,
        "attention.q_norm": ("self_attn.q_norm",),
        "attention.k_norm": ("self_attn.k_norm",),
        # Llama has this name for the norm before its feed-forward network.
        "attention_output_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_output_norm": ("post_feedforward_layernorm",),
    },
    values={"qk_norm": True, "norm_plus_one": True, "output_norms": True, "mlp": "geglu", "tied": True},
    by_width=lambda hidden: {"embedding_scale": math.sqrt(hidden)},
    # Beside `layer_types` the pattern has no effect; without them `_period` reads it.
    without_effect=frozenset({"cache_implementation", "_sliding_window_pattern"}),
    from_config=_from_config,
    to_config=_to_config,
)


def _preset(
    size: dict[str, Any], kv_heads: int, head_dim: int, window: int, learning_rate: float, **other: Any
) -> Preset:
    scaling = other.pop("rope_scaling", {"kind": "linear", "factor": 8.0})
    model = {
        **size,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 262_208,
        "max_seq_len": 131_072,
        "norm_eps": 1e-6,
        "embedding_scale": math.sqrt(size["hidden"]),
        # One period is enough: the pattern is repeated.
        **kinds_of_layers([LOCAL] * 5 + [GLOBAL], window, {LOCAL: _base(LOCAL), GLOBAL: _base(GLOBAL, scaling)}),
        **other,
    }
    return Preset(model=model, learning_rate=learning_rate, seq_len=8192)


def _base(kind: str, scaling: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"rope_theta": BASES[kind], "rope_scaling": scaling}


PRESETS = {
    "gemma3-1b": _preset(
        sizes(26, 1152, 4, 6912), 1, 256, 512, 4e-4, vocab_size=262_144, max_seq_len=32_768, rope_scaling=None
    ),
    "gemma3-4b": _preset(sizes(34, 2560, 8, 10240), 4, 256, 1024, 3e-4),
    "gemma3-12b": _preset(sizes(48, 3840, 16, 15360), 8, 256, 1024, 3e-4),
    "gemma3-27b": _preset(sizes(62, 5376, 32, 21504), 16, 128, 1024, 1.5e-4, score_scale=168**-0.5),
}
