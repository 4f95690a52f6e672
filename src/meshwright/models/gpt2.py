"""GPT-2 (Radford et al. 2019) in Hugging Face folders; the GPT-3 and Megatron presets have the same architecture."""

from __future__ import annotations

from typing import Any

from meshwright.models.hf_config import DEEPSEEK_FIELDS, Family, HFConfig
from meshwright.models.llama import NO_DROPOUT
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("activation_function", "gelu_new", "gelu_pytorch_tanh")
    config.expect("scale_attn_weights", True)
    config.expect("scale_attn_by_inverse_layer_idx", False)
    config.expect("add_cross_attention", False)
    config.note_unused(NO_DROPOUT, "attn_pdrop", "embd_pdrop", "resid_pdrop")
    hidden, heads = config.integer("n_embd", "hidden_size"), config.integer("n_head", "num_attention_heads")
    if hidden % heads:
        raise config.error("n_head", heads, f"a divisor of n_embd ({hidden})")
    return {
        "layers": config.integer("n_layer", "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_hidden": config.integer("n_inner", default=4 * hidden),
        "vocab_size": config.integer("vocab_size"),
        "max_seq_len": config.integer("n_positions", "max_position_embeddings"),
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "init_std": config.number("initializer_range", 0.02),
    }


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
    return {
        "n_embd": spec.hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "n_inner": spec.ffn_hidden,
        "n_positions": spec.max_seq_len,
        "n_ctx": spec.max_seq_len,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": spec.norm_eps,
        "initializer_range": spec.init_std,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "scale_attn_weights": True,
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
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
    fixed={
        **DEEPSEEK_FIELDS,
        "positions": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "bias": True,
        "qk_norm": False,
        "parallel_block": False,
        "sliding_window": None,
        "rope_scaling": None,
        "experts": 0,
    },
    tied=True,
    from_config=_from_config,
    to_config=_to_config,
)
