"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434): latent attention, and MoE layers after the first layers.

The order of rotated dimensions is that of the folders: each pair of neighbours is rotated
(`kernels.rope.rotate_neighbours`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.families.format import HFConfig, presets, size
from meshwright.families.keys import experts, latent
from meshwright.families.llama import LLAMA
from meshwright.spec.model import ModelSpec

_GREEDY = "greedy"
_LIMITED = "group_limited_greedy"


def _from_config(config: HFConfig) -> dict[str, Any]:
    config.expect("scoring_func", "softmax")
    config.expect("topk_method", _GREEDY, _LIMITED)
    config.expect("norm_topk_prob", False)  # The class in transformers ignores this key.
    limited = config.get("topk_method") == _LIMITED
    config.read.update(("n_group", "topk_group"))
    fields = latent.read(config)
    return {
        **fields,
        **experts.read_shared(config, fields["expert_hidden"], 2),
        "routing_scale": config.number("routed_scaling_factor", 1.0),
        "expert_groups": config.integer("n_group") if limited else 1,
        "groups_per_token": config.integer("topk_group") if limited else 1,
    }


def _to_config(spec: ModelSpec) -> dict[str, Any]:
    method = _GREEDY if spec.expert_groups == spec.groups_per_token else _LIMITED
    return {**latent.write(spec), "scoring_func": "softmax", "topk_method": method, "mlp_bias": False}


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
        **experts.MODULES,
        **experts.SHARED_MODULES,
    },
    tensors=lambda spec: {"attention.q.weight": f"self_attn.q_{'b_' if spec.q_rank else ''}proj.weight"},
    values={"normalised_routing": False},
    required=(*experts.REQUIRED, "head_dim", "kv_rank", "rope_head_dim", "value_head_dim", "shared_expert_hidden"),
    without_effect=frozenset({"head_dim", "qk_head_dim", "seq_aux"}),
    from_config=_from_config,
    to_config=_to_config,
)
HEADS = {"head_dim": 192, "kv_rank": 512, "q_rank": 1536, "rope_head_dim": 64, "value_head_dim": 128, "norm_eps": 1e-6}
"""ModelSpec fields that the released models of DeepSeek and Kimi have in common."""
_LARGE = {"experts": 160, "expert_hidden": 1536, "shared_expert_hidden": 3072, "routing_scale": 16.0}
PRESETS = presets(
    {
        "deepseek-v2-lite": size(
            *(27, 2048, 16, 16, 10944, 4.2e-4), q_rank=0, experts=64, expert_hidden=1408, shared_expert_hidden=2816
        ),
        "deepseek-v2": size(60, 5120, 128, 128, 12288, 2.4e-4, expert_groups=8, groups_per_token=3, **_LARGE),
    },
    seq_len=4096,
    vocab_size=102400,
    max_seq_len=163840,
    experts_per_token=6,
    first_dense_layers=1,
    yarn={"mscale": 0.707, "mscale_all_dim": 0.707},
    **HEADS,
)
RELEASES = ("DeepSeek-V2-Lite-Chat", "DeepSeek-V2-Chat")
