"""Small models of every variant that the decoder supports."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.models.decoder import Decoder
from meshwright.models.initial_values import initialise
from meshwright.spec.blocks.positions import LongRopeScaling
from meshwright.spec.model import KindSpec, ModelSpec, RopeScaling, YarnScaling

LLAMA = ModelSpec(
    family="llama",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_hidden=96,
    vocab_size=131,
    max_seq_len=512,
    init_std=0.1,
)
QWEN3 = replace(LLAMA, family="qwen3", head_dim=24, qk_norm=True, norm_eps=1e-6, rope_theta=1e6, tied=True)
QWEN2 = replace(LLAMA, family="qwen2", qkv_bias=True, norm_eps=1e-6, rope_theta=1e6, tied=True)
GPT2 = replace(
    LLAMA,
    family="gpt2",
    kv_heads=4,
    ffn_hidden=200,
    positions="learned",
    norm="layernorm",
    mlp="gelu",
    bias=True,
    tied=True,
)
SCALED = replace(LLAMA, rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=64), tied=True, bias=True)
SMOLLM3 = replace(
    LLAMA,
    family="smollm3",
    layers=4,
    tied=True,
    blocks={"rotary": KindSpec(), "bare": KindSpec(positions="none")},
    pattern=("3*rotary", "bare"),
)
PARALLEL = replace(LLAMA, parallel_block=True)
SLIDING = replace(LLAMA, sliding_window=9)
LOCAL_GLOBAL = replace(
    QWEN3,
    layers=4,
    sliding_window=9,
    rope_theta=500.0,
    blocks={
        "local": KindSpec(ffn_hidden=48),
        "global": KindSpec(sliding_window=0, rope_theta=1e6, rope_scaling=RopeScaling(original_max_seq_len=64)),
        "bare": KindSpec(sliding_window=0, positions="none"),
    },
    first=("bare",),
    pattern=("2*local", "global"),
)
"""Layers that differ in window, rotation and width."""
GEMMA = replace(
    LLAMA,
    family="gemma3_text",
    layers=3,
    head_dim=12,
    ffn_hidden=72,
    norm_eps=1e-6,
    norm_plus_one=True,
    output_norms=True,
    mlp="geglu",
    qk_norm=True,
    embedding_scale=8.0,
    score_scale=0.125,
    tied=True,
    sliding_window=11,
    rope_theta=500.0,
    blocks={
        "local": KindSpec(),
        "global": KindSpec(sliding_window=0, rope_theta=1e6, rope_scaling=RopeScaling(kind="linear", factor=8.0)),
    },
    pattern=("local", "global"),
)
"""Weights of norms stored minus one, norms of outputs, two rotations."""
GEMMA2 = replace(
    GEMMA,
    family="gemma2",
    qk_norm=False,
    score_cap=0.5,
    logit_cap=1.5,
    blocks={"local": KindSpec(), "global": KindSpec(sliding_window=0)},
)
"""Caps of scores and logits."""
MIXTRAL = replace(
    LLAMA, family="mixtral", ffn_hidden=32, experts=5, experts_per_token=2, expert_hidden=32, sliding_window=21
)
QWEN3_MOE = replace(
    LLAMA,
    family="qwen3_moe",
    head_dim=24,
    qk_norm=True,
    norm_eps=1e-6,
    experts=6,
    experts_per_token=3,
    expert_hidden=24,
    first_dense_layers=1,
    normalised_routing=False,
)
GPT_OSS = replace(
    LLAMA,
    family="gpt_oss",
    layers=3,
    mlp="clamped_swiglu",
    qkv_bias=True,
    out_bias=True,
    sinks=True,
    experts=4,
    experts_per_token=2,
    ffn_hidden=32,
    expert_hidden=32,
    expert_bias=True,
    yarn=YarnScaling(factor=8.0, original_max_seq_len=16, mscale_all_dim=0.0, truncate=False),
    sliding_window=9,
    blocks={"local": KindSpec(), "global": KindSpec(sliding_window=0)},
    pattern=("local", "global"),
)
"""Sinks, windows in every other layer, clamped activation, biases of router and experts."""
QWEN2_MOE = replace(
    LLAMA,
    family="qwen2_moe",
    qkv_bias=True,
    experts=6,
    experts_per_token=3,
    expert_hidden=24,
    normalised_routing=False,
    shared_expert_hidden=40,
    shared_expert_gate=True,
)
GLM4_MOE = replace(
    LLAMA,
    family="glm4_moe",
    head_dim=16,
    rope_width=8,
    qk_norm=True,
    qkv_bias=True,
    router="sigmoid",
    experts=8,
    experts_per_token=3,
    expert_hidden=24,
    shared_expert_hidden=24,
    first_dense_layers=1,
    routing_scale=2.5,
)
MINIMAX_M2 = replace(
    LLAMA,
    family="minimax_m2",
    rope_width=8,
    qk_norm=True,
    qk_norm_whole=True,
    router="sigmoid",
    experts=6,
    experts_per_token=2,
    ffn_hidden=24,
    expert_hidden=24,
)
"""Sigmoid routing beside ordinary attention, of which a part of each head is rotated."""
SHARED = replace(
    PARALLEL, experts=4, experts_per_token=1, expert_hidden=40, shared_expert_hidden=16, mlp="gelu", bias=True
)
DEEPSEEK_V2 = replace(
    LLAMA,
    family="deepseek_v2",
    kv_heads=4,
    norm_eps=1e-6,
    kv_rank=20,
    q_rank=28,
    rope_head_dim=6,
    value_head_dim=12,
    experts=8,
    experts_per_token=3,
    expert_hidden=24,
    shared_expert_hidden=48,
    first_dense_layers=1,
    normalised_routing=False,
    expert_groups=4,
    groups_per_token=2,
    routing_scale=3.0,
    yarn=YarnScaling(factor=8.0, original_max_seq_len=64, mscale=0.7, mscale_all_dim=0.7),
)
DEEPSEEK_LITE = replace(
    DEEPSEEK_V2, q_rank=0, expert_groups=1, groups_per_token=1, yarn=None, routing_scale=1.0, first_dense_layers=0
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    family="deepseek_v3",
    router="sigmoid",
    normalised_routing=True,
    routing_scale=2.5,
    shared_expert_hidden=24,
    yarn=YarnScaling(factor=8.0, original_max_seq_len=64, mscale=1.0, mscale_all_dim=0.5),
)
LATENT = {"deepseek v2": DEEPSEEK_V2, "deepseek lite": DEEPSEEK_LITE, "deepseek v3": DEEPSEEK_V3}
"""Models with latent attention."""
MOE_LAYERS = {
    "mixtral": MIXTRAL,
    "qwen3 moe": QWEN3_MOE,
    "shared expert": SHARED,
    "gpt-oss": GPT_OSS,
    "qwen2 moe": QWEN2_MOE,
}
ALL = {
    "llama": LLAMA,
    "llama3 scaling": SCALED,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gpt2": GPT2,
    "parallel": PARALLEL,
    "sliding": SLIDING,
    "local and global": LOCAL_GLOBAL,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    **MOE_LAYERS,
    "glm4 moe": GLM4_MOE,
    "minimax m2": MINIMAX_M2,
}
DENSE = {
    "glm4": replace(LLAMA, family="glm4", rope_width=8, rope_pairs="neighbours", output_norms=True, qkv_bias=True),
    "granite": replace(
        LLAMA,
        family="granite",
        embedding_scale=12.0,
        residual_factor=0.22,
        logit_factor=0.125,
        score_scale=0.1,
        tied=True,
    ),
    "ministral3": replace(
        LLAMA,
        family="ministral3",
        yarn=YarnScaling(factor=16.0, original_max_seq_len=16),
        query_growth=0.5,
        sliding_window=21,
    ),
    "olmo3": replace(
        LLAMA,
        family="olmo3",
        layers=3,
        qk_norm=True,
        qk_norm_whole=True,
        input_norms=False,
        output_norms=True,
        sliding_window=9,
        blocks={
            "local": KindSpec(),
            "global": KindSpec(
                sliding_window=0,
                yarn=YarnScaling(factor=8.0, original_max_seq_len=16, mscale_all_dim=0.0, attention_factor=1.2),
            ),
        },
        pattern=("local", "global"),
    ),
    "phi3": replace(
        LLAMA,
        family="phi3",
        rope_width=12,
        longrope=LongRopeScaling(
            short_factor=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5),
            long_factor=(1.0, 1.5, 3.0, 5.0, 9.0, 20.0),
            factor=64.0,
            original_max_seq_len=8,
        ),
        sliding_window=25,
    ),
}
"""What no model above has: rotation of a part, of neighbours or with LongRoPE, growing queries, norms of all heads together, factors."""


RECOMBINED = {
    "glm": replace(DENSE["glm4"], family="glm", output_norms=False),
    "gemma1": replace(LLAMA, family="gemma", norm_plus_one=True, mlp="geglu", embedding_scale=8.0, tied=True),
    "ministral": replace(
        LLAMA,
        family="ministral",
        sliding_window=9,
        blocks={"local": KindSpec(), "global": KindSpec(sliding_window=0)},
        pattern=("global", "local"),
    ),
    "exaone4": replace(
        LLAMA,
        family="exaone4",
        layers=4,
        qk_norm=True,
        input_norms=False,
        output_norms=True,
        sliding_window=9,
        blocks={"local": KindSpec(), "global": KindSpec(sliding_window=0, positions="none")},
        pattern=("3*local", "global"),
    ),
    "olmoe": replace(
        MIXTRAL, family="olmoe", sliding_window=None, qk_norm=True, qk_norm_whole=True, normalised_routing=False
    ),
    "flex olmo": replace(
        MIXTRAL,
        family="flex_olmo",
        sliding_window=None,
        qk_norm=True,
        qk_norm_whole=True,
        input_norms=False,
        output_norms=True,
    ),
    "ernie4.5 moe": replace(
        MIXTRAL,
        family="ernie4_5_moe",
        sliding_window=None,
        rope_pairs="neighbours",
        router="biased_softmax",
        shared_expert_hidden=2 * MIXTRAL.expert_hidden,
        first_dense_layers=1,
    ),
    "dots1": replace(GLM4_MOE, family="dots1", rope_width=0, qkv_bias=False),
    "glm4 moe lite": replace(
        DEEPSEEK_V3, family="glm4_moe_lite", expert_groups=1, groups_per_token=1, value_head_dim=16, yarn=None
    ),
    "granite moe": replace(
        MIXTRAL,
        family="granitemoe",
        sliding_window=None,
        embedding_scale=12.0,
        residual_factor=0.22,
        logit_factor=0.125,
        score_scale=0.1,
    ),
}
RECOMBINED["hunyuan"] = replace(
    LLAMA, family="hunyuan_v1_dense", qk_norm=True, qk_norm_rotated=True, qkv_bias=True, out_bias=True
)
RECOMBINED["hunyuan moe"] = replace(
    MIXTRAL,
    family="hunyuan_v1_moe",
    sliding_window=None,
    qk_norm=True,
    qk_norm_rotated=True,
    shared_expert_hidden=MIXTRAL.expert_hidden,
)
RECOMBINED["granite moe shared"] = replace(
    RECOMBINED["granite moe"], family="granitemoeshared", shared_expert_hidden=40
)
"""Mechanisms of the models above, together as families have them."""


def built(spec, *, reference=False, dtype=torch.float64, loss_chunk=16, vary=True):
    """A model with its initial values; `vary` adds noise to norms and biases, so that a missing one changes the output."""
    with torch.device("meta"):
        model = Decoder(spec, reference=reference, loss_chunk=loss_chunk)
    model = model.to(dtype).to_empty(device="cpu")
    initialise(model, spec, seed=1)
    if vary:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 or name.endswith("_bias"):  # those of experts are matrices
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def some_tokens(spec, batch=2, seq=40):
    return torch.randint(0, spec.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(3))
