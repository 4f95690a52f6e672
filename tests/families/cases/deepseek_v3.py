"""DeepSeek-V3: small random models, and published numbers of parameters."""

from __future__ import annotations

import random
from typing import Any

from tests.families.drawn import small

WRONG = {
    "weights normalised the other way": lambda spec: {"normalised_routing": not spec.normalised_routing},
    "no YaRN": lambda spec: {"yarn": None} if spec.yarn else {},
    "weights not scaled": lambda spec: {"routing_scale": 1.0} if spec.routing_scale != 1 else {},
    "all groups of experts": lambda spec: (
        {"expert_groups": 1, "groups_per_token": 1} if spec.groups_per_token < spec.expert_groups else {}
    ),
    "no shared expert": lambda spec: {"shared_expert_hidden": 0},
    "softmax scores": lambda spec: {"router": "softmax"},
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
        "n_group": draw.choice((2, 4)),
        "topk_group": 2,
        "norm_topk_prob": draw.random() < 0.5,
        "num_mtp_layers": 0,
    }


PARAMETERS = {"deepseek-v3": 671_026_419_200}
"""Without the module that predicts a further token; the choice biases count."""
CHANGED = {
    "rope_parameters",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "topk_method",
    "scoring_func",
    "moe_layer_freq",
}
"""transformers does not keep the modules that predict further tokens, and its class does not know the other keys.

`type` of YaRN is for old readers.
"""
RELEASED = {
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
}
