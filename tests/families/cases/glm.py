"""GLM-4-9B: small random models of GLM-4-0414 without norms of outputs, and the published number of parameters."""

from __future__ import annotations

from tests.families.cases import glm4

config = glm4.config
PARAMETERS = {"glm4-9b-chat": 9_399_951_360}
WRONG = {
    **{name: fields for name, fields in glm4.WRONG.items() if name != "no norms of outputs"},
    "norms of outputs": lambda spec: {"output_norms": True},
}
RELEASED = {
    "glm4-9b-chat": {
        "architectures": ["GlmForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 13696,
        "max_position_embeddings": 131072,
        "model_type": "glm",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 151552,
    }
}
