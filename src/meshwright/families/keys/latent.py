"""Keys of config.json for latent attention, as in DeepSeek-V2 and its successors."""

from __future__ import annotations

from typing import Any

from meshwright.families.format import ConfigKeys, HFConfig, Key
from meshwright.families.keys import experts
from meshwright.families.keys.decoder import NO_DROPOUT
from meshwright.families.keys.rope import SECTION_KEYS, section_of
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

_KEYS = ConfigKeys(
    {
        "heads": Key("num_attention_heads"),
        "rope_head_dim": Key("qk_rope_head_dim", 64),
        "layers": Key("num_hidden_layers"),
        "hidden": Key("hidden_size"),
        "value_head_dim": Key("v_head_dim", 128),
        "kv_rank": Key("kv_lora_rank", 512),
        "ffn_hidden": Key("intermediate_size"),
        "vocab_size": Key("vocab_size"),
        "max_seq_len": Key("max_position_embeddings"),
        "init_std": Key("initializer_range", 0.02),
    },
    fixed={"attention_bias": False, "moe_layer_freq": 1},
)
_EXPERTS = experts.keys(
    Key("n_routed_experts"),
    8,
    Key("moe_intermediate_size", 1407),
    first_dense_layers=Key("first_k_dense_replace", 0, least=0),
)


def read(config: HFConfig, *, norm_eps: float = 1e-6) -> dict[str, Any]:
    """Return the ModelSpec fields of these keys, except those of routing. `norm_eps` is the default of the class."""
    config.expect("hidden_act", "silu", "swish")
    config.expect("mlp_bias", False)
    config.note_unused(NO_DROPOUT, "attention_dropout")
    fields = {**_KEYS.read(config), **experts.read(config, _EXPERTS, "aux_loss_alpha")}
    config.expect("num_key_value_heads", fields["heads"])
    return {
        **fields,
        "kv_heads": fields["heads"],
        "head_dim": config.integer("qk_nope_head_dim", default=128) + fields["rope_head_dim"],
        "q_rank": 0 if config.get("q_lora_rank", 1536) is None else config.integer("q_lora_rank", default=1536),
        "norm_eps": config.number("rms_norm_eps", norm_eps),
        **_read_yarn(config),
    }


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys with their values, including those of routing."""
    routed = {**experts.write(spec, _EXPERTS, "DeepSeek"), **ConfigKeys(experts.ROUTING).write(spec)}
    if not spec.kv_rank:
        raise BadInput("model.kv_rank: a DeepSeek folder needs latent attention, got 0")
    return {
        **_KEYS.write(spec),
        **routed,
        **experts.write_shared(spec, "DeepSeek"),
        "num_key_value_heads": spec.heads,
        "qk_nope_head_dim": spec.head_dim - spec.rope_head_dim,
        "q_lora_rank": spec.q_rank or None,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **_write_yarn(spec),
    }


def _read_yarn(config: HFConfig) -> dict[str, Any]:
    """Return `rope_theta` and `yarn`. transformers 5 has both in `rope_parameters`; version 4 has `rope_theta` and `rope_scaling`."""
    key, section = section_of(config)
    inside = HFConfig({"rope_theta": config.get("rope_theta"), **section}, f"{config.where}: {key}")
    fields: dict[str, Any] = {"rope_theta": inside.number("rope_theta", 10000.0), "yarn": None}
    type_key = "rope_type" if "rope_type" in section else "type"
    inside.expect(type_key, "default", "yarn")
    if section.get(type_key, "default") == "default":
        inside.refuse_unknown(SECTION_KEYS)
        return fields
    inside.expect("attention_factor")
    inside.expect("truncate", True)
    whole = inside.get("mscale_all_dim") or 0.0
    yarn = {
        "factor": inside.number("factor"),
        "original_max_seq_len": inside.integer("original_max_position_embeddings"),
        "beta_fast": inside.number("beta_fast", 32.0),
        "beta_slow": inside.number("beta_slow", 1.0),
        # If `mscale_all_dim` is absent, transformers multiplies the rotated part by 1, whatever `mscale` is.
        "mscale": inside.number("mscale", 1.0) if whole else 1.0,
        "mscale_all_dim": float(whole),
    }
    inside.refuse_unknown(SECTION_KEYS | {"mscale"})
    return {**fields, "yarn": yarn}


def _write_yarn(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of `_read_yarn`, for both versions of transformers."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if (yarn := spec.yarn) is not None:
        rope = {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_seq_len,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": None if yarn is None else {**rope, "type": "yarn"},
        "rope_parameters": {**rope, "rope_theta": spec.rope_theta},
    }
