"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434): latent attention, and a mixture of experts after the first layers.

The presets are as released. Rotated dimensions stay in the order of the folders: pairs of neighbours (`kernels.rope.rotate_neighbours`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import SECTION_KEYS, HFConfig, Preset, rope_section, sizes
from meshwright.families.llama import LLAMA, NO_DROPOUT
from meshwright.families.mixtral import BALANCE_LOSS_NOTE, EXPERTS, refuse_dense
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

_GREEDY, _LIMITED = "greedy", "group_limited_greedy"


def shared_fields(config: HFConfig) -> dict[str, Any]:
    """The ModelSpec fields that V2 and V3 read alike."""
    config.expect("hidden_act", "silu", "swish")
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    config.expect("moe_layer_freq", 1)
    config.note_unused(NO_DROPOUT, "attention_dropout")
    config.note_unused(BALANCE_LOSS_NOTE, "aux_loss_alpha")
    heads, rotated = config.integer("num_attention_heads"), config.integer("qk_rope_head_dim", default=64)
    config.expect("num_key_value_heads", heads)
    width = config.integer("moe_intermediate_size", default=1407)
    return {
        "layers": config.integer("num_hidden_layers"),
        "hidden": config.integer("hidden_size"),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": config.integer("qk_nope_head_dim", default=128) + rotated,
        "rope_head_dim": rotated,
        "value_head_dim": config.integer("v_head_dim", default=128),
        "kv_rank": config.integer("kv_lora_rank", default=512),
        "q_rank": 0 if config.get("q_lora_rank", 1536) is None else config.integer("q_lora_rank", default=1536),
        "ffn_hidden": config.integer("intermediate_size"),
        "vocab_size": config.integer("vocab_size"),
        "max_seq_len": config.integer("max_position_embeddings"),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "init_std": config.number("initializer_range", 0.02),
        "experts": config.integer("n_routed_experts"),
        "experts_per_token": config.integer("num_experts_per_tok", default=8),
        "expert_hidden": width,
        "first_dense_layers": config.get("first_k_dense_replace") or 0,
        "routing_scale": config.number("routed_scaling_factor", 1.0),
        **_read_yarn(config),
    }


def shared_config(spec: ModelSpec) -> dict[str, Any]:
    """The config.json keys that V2 and V3 write alike."""
    refuse_dense(spec, "DeepSeek")
    if not spec.kv_rank:
        raise BadInput("model.kv_rank: a DeepSeek folder needs latent attention, got 0")
    return {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_hidden,
        "moe_intermediate_size": spec.expert_hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.heads,
        "q_lora_rank": spec.q_rank or None,
        "kv_lora_rank": spec.kv_rank,
        "qk_nope_head_dim": spec.head_dim - spec.rope_head_dim,
        "qk_rope_head_dim": spec.rope_head_dim,
        "v_head_dim": spec.value_head_dim,
        "n_routed_experts": spec.experts,
        "n_shared_experts": shared_count(spec, "DeepSeek"),
        "num_experts_per_tok": spec.experts_per_token,
        "first_k_dense_replace": spec.first_dense_layers,
        "n_group": spec.expert_groups,
        "topk_group": spec.groups_per_token,
        "routed_scaling_factor": spec.routing_scale,
        "norm_topk_prob": spec.normalised_routing,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "initializer_range": spec.init_std,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "moe_layer_freq": 1,
        "output_router_logits": False,
        **_write_yarn(spec),
    }


def _v2_fields(config: HFConfig) -> dict[str, Any]:
    config.expect("scoring_func", "softmax")
    config.expect("topk_method", _GREEDY, _LIMITED)
    config.expect("norm_topk_prob", False)  # transformers' class ignores it
    limited = config.get("topk_method") == _LIMITED
    config.read.update(("n_group", "topk_group"))
    return {
        **shared_fields(config),
        **shared_width(config, 2),
        "expert_groups": config.integer("n_group") if limited else 1,
        "groups_per_token": config.integer("topk_group") if limited else 1,
    }


def _v2_config(spec: ModelSpec) -> dict[str, Any]:
    method = _GREEDY if spec.expert_groups == spec.groups_per_token else _LIMITED
    return {**shared_config(spec), "scoring_func": "softmax", "topk_method": method, "mlp_bias": False}


def shared_width(config: HFConfig, default: int) -> dict[str, Any]:
    """The shared experts of a layer are one of their joint width."""
    shared = config.integer("n_shared_experts", default=default)
    return {"shared_expert_hidden": shared * config.integer("moe_intermediate_size", default=1407)}


def shared_count(spec: ModelSpec, folder: str) -> int:
    """The number of shared experts of a layer; raises BadInput if their joint width is no multiple of an expert's."""
    if not spec.shared_expert_hidden or spec.shared_expert_hidden % spec.expert_hidden:
        raise BadInput(
            f"model.shared_expert_hidden: a {folder} folder needs a multiple of expert_hidden ({spec.expert_hidden}), "
            f"got {spec.shared_expert_hidden}"
        )
    return spec.shared_expert_hidden // spec.expert_hidden


def _read_yarn(config: HFConfig) -> dict[str, Any]:
    """`rope_theta` and `yarn` from `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (4 and before)."""
    key, section = rope_section(config)
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
        # Without a growth of whole queries transformers lets the rotated part grow by 1, whatever `mscale` is.
        "mscale": inside.number("mscale", 1.0) if whole else 1.0,
        "mscale_all_dim": float(whole),
    }
    inside.refuse_unknown(SECTION_KEYS | {"mscale"})
    return {**fields, "yarn": yarn}


def _write_yarn(spec: ModelSpec) -> dict[str, Any]:
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


RELEASED = {
    "head_dim": 192,
    "kv_rank": 512,
    "q_rank": 1536,
    "rope_head_dim": 64,
    "value_head_dim": 128,
    "vocab_size": 102400,
    "max_seq_len": 163840,
    "norm_eps": 1e-6,
    "experts_per_token": 6,
    "first_dense_layers": 1,
    "yarn": {"mscale": 0.707, "mscale_all_dim": 0.707},
}
"""ModelSpec fields that the released models of V2 share."""
FAMILY = DEEPSEEK_V2 = replace(
    LLAMA,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    modules={
        **{ours: theirs for ours, theirs in LLAMA.modules.items() if ours != "attention.qkv"},
        "attention.down": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        "attention.kv_down": ("self_attn.kv_a_proj_with_mqa",),
        "attention.q_norm": ("self_attn.q_a_layernorm",),
        "attention.kv_norm": ("self_attn.kv_a_layernorm",),
        "attention.kv_up": ("self_attn.kv_b_proj",),
        "moe.router": ("mlp.gate",),
        "moe.experts.gate_up": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
        "moe.experts.down": ("mlp.experts.{expert}.down_proj",),
        "moe.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "moe.shared.down": ("mlp.shared_experts.down_proj",),
    },
    tensors=lambda spec: {"attention.q.weight": f"self_attn.q_{'b_' if spec.q_rank else ''}proj.weight"},
    values={"normalised_routing": False},
    required=(*EXPERTS, "head_dim", "kv_rank", "rope_head_dim", "value_head_dim", "shared_expert_hidden"),
    without_effect=frozenset({"head_dim", "qk_head_dim", "seq_aux"}),
    from_config=_v2_fields,
    to_config=_v2_config,
)
PRESETS = {
    "deepseek-v2-lite": Preset(
        model={
            **RELEASED,
            **sizes(27, 2048, 16, 10944),
            "kv_heads": 16,
            "q_rank": 0,
            "experts": 64,
            "expert_hidden": 1408,
            "shared_expert_hidden": 2816,
        },
        learning_rate=4.2e-4,
        seq_len=4096,
    ),
    "deepseek-v2": Preset(
        model={
            **RELEASED,
            **sizes(60, 5120, 128, 12288),
            "kv_heads": 128,
            "experts": 160,
            "expert_hidden": 1536,
            "shared_expert_hidden": 3072,
            "expert_groups": 8,
            "groups_per_token": 3,
            "routing_scale": 16.0,
        },
        learning_rate=2.4e-4,
        seq_len=4096,
    ),
}
