"""GPT-2 (Radford et al. 2019), and larger models of the same architecture.

The presets and their sources:

- GPT-2, and GPT-3 (Brown et al. 2020, table 2.1). The 13B model has width 5120, because its 40 heads have 128
  dimensions each.
- Megatron-Turing NLG 530B (Smith et al. 2022).
- Megatron 1T (Narayanan et al. 2021, table 1).
- PanGu-α 200B (Zeng et al. 2021, table 1). Here it has 64 ordinary layers, which give the paper's 207.0 billion
  parameters. The position queries of its last layer are left out.
"""

from __future__ import annotations

from typing import Any

from meshwright.families.format import ConfigKeys, Family, HFConfig, Key, presets, size
from meshwright.families.keys.decoder import NO_DROPOUT
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

_KEYS = ConfigKeys(
    {
        "hidden": Key("n_embd", other="hidden_size"),
        "heads": Key("n_head", other="num_attention_heads"),
        "layers": Key("n_layer", other="num_hidden_layers"),
        "vocab_size": Key("vocab_size"),
        "max_seq_len": Key("n_positions", other="max_position_embeddings"),
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "init_std": Key("initializer_range", 0.02),
    },
    fixed={"scale_attn_weights": True},
)
_DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("activation_function", "gelu_new", "gelu_pytorch_tanh")
    config.expect("scale_attn_by_inverse_layer_idx", False)
    config.expect("add_cross_attention", False)
    config.note_unused(NO_DROPOUT, *_DROPOUTS)
    fields = _KEYS.read(config)
    hidden = fields["hidden"]
    heads = fields["heads"]
    if hidden % heads:
        raise config.error("n_head", heads, f"a divisor of n_embd ({hidden})")
    ffn_hidden = config.integer("n_inner", default=4 * hidden)
    return {**fields, "kv_heads": heads, "head_dim": hidden // heads, "ffn_hidden": ffn_hidden}


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    if spec.kv_heads != spec.heads:
        raise BadInput(
            f"model.kv_heads: a GPT-2 folder has as many key/value heads as heads ({spec.heads}), got {spec.kv_heads}"
        )
    if spec.heads * spec.head_dim != spec.hidden:
        raise BadInput(
            f"model.head_dim: a GPT-2 folder needs heads × head_dim = hidden ({spec.hidden}), "
            f"got {spec.heads} × {spec.head_dim}"
        )
    keys = {**_KEYS.write(spec), **dict.fromkeys(_DROPOUTS, 0.0), "n_ctx": spec.max_seq_len}
    return {**keys, "n_inner": spec.ffn_hidden, "activation_function": "gelu_new"}


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    score_class="GPT2ForSequenceClassification",
    base="transformer.",
    layer="transformer.h.{layer}.",
    ends={"embed": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"},
    modules={
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.out": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    transposed=frozenset({"attention.qkv", "attention.out", "mlp.up", "mlp.down"}),
    unused=("attn.bias", "attn.masked_bias"),
    values={"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "tied": True},
    without_effect=frozenset(
        {
            "gradient_checkpointing",
            "n_ctx",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
    from_config=_from_config,
    to_config=_to_config,
)


def _of_kind(layers: int, hidden: int, heads: int, learning_rate: float, **other: Any) -> dict[str, Any]:
    """Return the own fields of a preset in which all heads are key/value heads and the feed-forward network is 4 · hidden wide."""
    return size(layers, hidden, heads, heads, 4 * hidden, learning_rate, head_dim=hidden // heads, **other)


PRESETS = (
    presets({"gpt2-124m": _of_kind(12, 768, 12, 6e-4)}, seq_len=1024, vocab_size=50257, max_seq_len=1024)
    | presets(
        {
            "gpt3-13b": _of_kind(40, 5120, 40, 1e-4),
            "gpt3-175b": _of_kind(96, 12288, 96, 6e-5),
            "gpt-530b": _of_kind(105, 20480, 128, 5e-5, vocab_size=51200),
            "gpt-1t": _of_kind(128, 25600, 160, 5e-5, vocab_size=51200),
        },
        seq_len=2048,
        vocab_size=50257,
        max_seq_len=2048,
    )
    | presets({"pangu-alpha-200b": _of_kind(64, 16384, 128, 2e-5)}, seq_len=1024, vocab_size=40000, max_seq_len=1024)
)
RELEASES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
