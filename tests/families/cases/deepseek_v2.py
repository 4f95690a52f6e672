"""DeepSeek-V2: small random models, and published numbers of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

WRONG = {
    "weights normalised the other way": lambda spec: {"normalised_routing": not spec.normalised_routing},
    "no YaRN": lambda spec: {"yarn": None} if spec.yarn else {},
    "weights not scaled": lambda spec: {"routing_scale": 1.0} if spec.routing_scale != 1 else {},
    "all groups of experts": lambda spec: (
        {"expert_groups": 1, "groups_per_token": 1}
        if spec.groups_per_token
        < min(spec.expert_groups, spec.experts_per_token)  # else the best are in the best groups
        else {}
    ),
    "no shared expert": lambda spec: {"shared_expert_hidden": 0},
}


def config(draw: random.Random) -> dict[str, Any]:
    keys, heads = small(draw), draw.choice((2, 4))
    yarn = {
        "rope_type": "yarn",
        "rope_theta": draw.choice((5e3, 1e4)),
        "factor": draw.choice((4.0, 8.0)),
        "original_max_position_embeddings": draw.choice((16, 64)),
        "beta_fast": draw.choice((20.0, 32.0)),
        "beta_slow": 1.0,
        "mscale": draw.choice((0.7, 1.0)),
        "mscale_all_dim": draw.choice((0.5, 0.7)),
    }
    return {
        **keys,
        **({"rope_parameters": yarn} if draw.random() < 0.7 else {}),
        "hidden_size": 4 * draw.choice((8, 11)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "moe_intermediate_size": draw.choice((16, 24)),
        "n_routed_experts": 8,
        "num_experts_per_tok": draw.choice((2, 3)),
        "n_shared_experts": draw.choice((1, 2)),
        "kv_lora_rank": draw.choice((12, 20)),
        "q_lora_rank": draw.choice((None, 28)),
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": draw.choice((8, 12)),
        "first_k_dense_replace": draw.choice((0, 1)),
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        **draw.choice(
            ({"topk_method": "greedy"}, {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2})
        ),
    }


PARAMETERS = {"deepseek-v2-lite": 15_706_484_224, "deepseek-v2": 235_741_434_880}
CHANGED = {"rope_parameters", "n_group", "topk_group", "scoring_func", "moe_layer_freq"}
"""Groups have no effect with `greedy`; the class does not know the other keys. `type` of YaRN is for old readers."""
RELEASED = {
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 102400,
    }
}
