"""Random models and plans, so that tests combine features that no list of cases combines.

A seed always gives the same model, plan and document mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import NamedTuple, get_args

from meshwright.planner.candidate import untrainable
from meshwright.schedules.registry import entry_of, refusal
from meshwright.spec.blocks.positions import LongRopeScaling
from meshwright.spec.layout import check_context, check_tensor, stage_table
from meshwright.spec.model import KindSpec, ModelSpec, YarnScaling
from meshwright.spec.plan import (
    RECOMPUTE_MODES,
    AxisName,
    BatchPlan,
    ExpertPlan,
    LayerStrategy,
    MeshAxis,
    Plan,
    Precision,
    ScheduleName,
    SchedulePlan,
)
from tests.distributed.test_equality import BATCH, GPT, LLAMA
from tests.models.tiny import RECOMBINED

SEQ = 16
DENSE = [
    replace(LLAMA, layers=8, max_seq_len=SEQ),
    replace(GPT, layers=8, hidden=16, heads=4, kv_heads=4, max_seq_len=SEQ),
    replace(LLAMA, family="qwen2", qkv_bias=True, tied=True, layers=5, max_seq_len=SEQ),
    replace(LLAMA, family="qwen3", qk_norm=True, layers=5, kv_heads=1, sliding_window=5, max_seq_len=SEQ),
    replace(LLAMA, parallel_block=True, layers=5, max_seq_len=SEQ),
]
LOCAL_GLOBAL = replace(
    LLAMA,
    family="smollm3",
    layers=7,
    max_seq_len=SEQ,
    blocks={
        "local": KindSpec(sliding_window=5, rope_theta=100.0, ffn_hidden=16),
        "global": KindSpec(),
        "bare": KindSpec(positions="none"),
    },
    first=("bare",),
    pattern=("2*local", "global"),
)
"""Layers that differ in window, rotation and width."""
GEMMA = replace(
    LOCAL_GLOBAL,
    family="gemma3_text",
    norm_plus_one=True,
    output_norms=True,
    mlp="geglu",
    qk_norm=True,
    embedding_scale=5.0,
    score_scale=0.3,
    tied=True,
)
"""The same with weights of norms stored minus one, norms of outputs, gated GELU, and scales of embedding and scores."""
FAMILIES = {
    "mistral": replace(LLAMA, family="mistral", layers=4, sliding_window=5, max_seq_len=SEQ),
    "ministral3": replace(
        LLAMA,
        family="ministral3",
        layers=4,
        yarn=YarnScaling(factor=16.0, original_max_seq_len=4),
        query_growth=0.5,
        max_seq_len=SEQ,
    ),
    "seed_oss": replace(LLAMA, family="seed_oss", layers=4, qkv_bias=True, max_seq_len=SEQ),
    "phi3": replace(
        LLAMA,
        family="phi3",
        layers=4,
        head_dim=6,
        rope_width=4,
        longrope=LongRopeScaling(
            short_factor=(1.0, 1.0), long_factor=(2.0, 9.0), factor=4.0, original_max_seq_len=SEQ // 4
        ),
        max_seq_len=SEQ,
    ),
    "granite": replace(
        LLAMA,
        family="granite",
        layers=4,
        tied=True,
        embedding_scale=5.0,
        residual_factor=0.4,
        logit_factor=0.5,
        score_scale=0.3,
        max_seq_len=SEQ,
    ),
    "olmo2": replace(
        LLAMA,
        family="olmo2",
        layers=4,
        qk_norm=True,
        qk_norm_whole=True,
        input_norms=False,
        output_norms=True,
        max_seq_len=SEQ,
    ),
    "olmo3": replace(
        LLAMA,
        family="olmo3",
        layers=5,
        qk_norm=True,
        qk_norm_whole=True,
        input_norms=False,
        output_norms=True,
        max_seq_len=SEQ,
        sliding_window=5,
        blocks={"local": KindSpec(), "global": KindSpec(sliding_window=0, yarn=YarnScaling(original_max_seq_len=4))},
        pattern=("2*local", "global"),
    ),
    "glm4": replace(
        LLAMA,
        family="glm4",
        layers=4,
        head_dim=8,
        rope_width=4,
        rope_pairs="neighbours",
        qkv_bias=True,
        output_norms=True,
        max_seq_len=SEQ,
    ),
    "ernie4_5": replace(
        LLAMA, family="ernie4_5", layers=4, rope_pairs="neighbours", bias=True, tied=True, max_seq_len=SEQ
    ),
}
"""A model of each dense family whose mechanisms no model above has."""
GEMMA2 = replace(
    GEMMA,
    family="gemma2",
    qk_norm=False,
    score_cap=0.5,
    logit_cap=1.5,
    blocks={"local": KindSpec(sliding_window=5), "global": KindSpec()},
    first=(),
    pattern=("local", "global"),
)
"""Caps of scores and logits."""
GPT_OSS = replace(
    LLAMA,
    family="gpt_oss",
    layers=5,
    max_seq_len=SEQ,
    mlp="clamped_swiglu",
    qkv_bias=True,
    out_bias=True,
    sinks=True,
    experts=8,
    experts_per_token=2,
    expert_hidden=6,
    expert_bias=True,
    sliding_window=5,
    blocks={"local": KindSpec(), "global": KindSpec(sliding_window=0)},
    pattern=("local", "global"),
)
"""Sinks, clamped activation, biases of router and experts."""
QWEN2_MOE = replace(
    LLAMA,
    family="qwen2_moe",
    layers=5,
    max_seq_len=SEQ,
    qkv_bias=True,
    experts=8,
    experts_per_token=3,
    expert_hidden=6,
    normalised_routing=False,
    shared_expert_hidden=4,
    shared_expert_gate=True,
)
GLM4_MOE = replace(
    LLAMA,
    family="glm4_moe",
    layers=5,
    max_seq_len=SEQ,
    head_dim=8,
    rope_width=4,
    qk_norm=True,
    qkv_bias=True,
    router="sigmoid",
    experts=8,
    experts_per_token=3,
    expert_hidden=6,
    shared_expert_hidden=4,
    first_dense_layers=1,
    routing_scale=2.5,
)
MINIMAX_M2 = replace(
    LLAMA,
    family="minimax_m2",
    layers=5,
    max_seq_len=SEQ,
    head_dim=8,
    rope_width=4,
    qk_norm=True,
    qk_norm_whole=True,
    router="sigmoid",
    experts=8,
    experts_per_token=2,
    expert_hidden=6,
)
KIMI_K2 = replace(
    LLAMA,
    family="kimi_k2",
    layers=4,
    max_seq_len=SEQ,
    kv_heads=LLAMA.heads,
    head_dim=10,
    kv_rank=6,
    q_rank=8,
    rope_head_dim=4,
    value_head_dim=6,
    router="sigmoid",
    experts=8,
    experts_per_token=2,
    expert_hidden=6,
    shared_expert_hidden=4,
    first_dense_layers=1,
    routing_scale=2.8,
)
FAMILIES |= {"glm4_moe": GLM4_MOE, "minimax_m2": MINIMAX_M2, "kimi_k2": KIMI_K2}
MOE_LAYERS = [
    replace(LLAMA, family="mixtral", layers=8, experts=8, experts_per_token=2, expert_hidden=6, max_seq_len=SEQ),
    replace(
        LLAMA,
        family="qwen3_moe",
        qk_norm=True,
        tied=True,
        layers=5,
        experts=8,
        experts_per_token=3,
        expert_hidden=6,
        kv_heads=1,
        first_dense_layers=2,
        normalised_routing=False,
        shared_expert_hidden=4,
        max_seq_len=SEQ,
    ),
]


def sized(spec: ModelSpec) -> ModelSpec:
    """A small model in the sizes of these tests."""
    experts = {"experts": 8, "experts_per_token": 2, "expert_hidden": 6} if spec.experts else {}
    shared = {"shared_expert_hidden": 4} if spec.shared_expert_hidden else {}
    sizes = {
        key: getattr(LLAMA, key) for key in ("hidden", "heads", "kv_heads", "ffn_hidden", "vocab_size", "init_std")
    }
    layers, head_dim = 5 if spec.blocks else 4, 8 if spec.rope_width else LLAMA.head_dim
    rope = {"rope_width": 4} if spec.rope_width else {}
    return replace(spec, **sizes, **experts, **shared, **rope, layers=layers, head_dim=head_dim, max_seq_len=SEQ)


FAMILIES |= {spec.family: replace(spec, layers=4) for spec in (DENSE[2], MOE_LAYERS[0])}
FAMILIES |= {spec.family: sized(spec) for spec in RECOMBINED.values() if not spec.kv_rank}
FAMILIES["glm4_moe_lite"] = replace(KIMI_K2, family="glm4_moe_lite", value_head_dim=KIMI_K2.head_dim)
SIZES: dict[AxisName, tuple[int, ...]] = {
    "pipeline": (1, 1, 2, 2, 4),
    "replicate": (1, 1, 2),
    "shard": (1, 1, 2, 2, 4),
    "context_ring": (1, 1, 1, 2, 4),
    "context_ulysses": (1, 1, 2),
    "tensor": (1, 1, 2, 4),
}


class DrawnCase(NamedTuple):
    """The case of a seed; unless `masked`, each sequence is one document."""

    spec: ModelSpec
    plan: Plan
    masked: bool


def draw_case(seed: int, precision: Precision, *, compile: bool = False, of: ModelSpec | None = None) -> DrawnCase:
    """Draw a trainable plan with this precision for 2 to 8 ranks (2 to 4 with `compile`), for the model `of` or a random one.

    With `precision.reduce_replicas` the plan has replicas.
    """
    draw = Random(seed)
    models = DENSE if precision.linear != "compute" else [*DENSE, *MOE_LAYERS]
    while True:
        spec = of or draw.choice(models)
        plan = _plan(draw, spec, precision, compile)
        replicas = precision.reduce_replicas is None or plan.axis_size("replicate") > 1
        if 2 <= plan.ranks <= (4 if compile else 8) and replicas and not _refused(plan, spec):
            return DrawnCase(spec, plan, masked=draw.random() < 0.6)


def _plan(draw: Random, spec: ModelSpec, precision: Precision, compile: bool) -> Plan:
    sizes = {axis: draw.choice(sizes_to_draw) for axis, sizes_to_draw in SIZES.items()}
    order = draw.sample(list(sizes), len(sizes)) if draw.random() < 0.5 else list(sizes)
    shard_ranks = sizes["shard"] * sizes["context_ring"] * sizes["context_ulysses"]
    samples_per_rank = BATCH // (sizes["replicate"] * sizes["shard"])
    micro = draw.choice([size for size in (1, 2, 4) if size <= samples_per_rank])
    pipelined: list[ScheduleName] = [name for name in get_args(ScheduleName) if not entry_of(name).pairs]
    expert = draw.choice([size for size in (1, 2, 4) if size <= shard_ranks])
    return Plan(
        mesh=tuple(MeshAxis(axis=axis, size=sizes[axis]) for axis in order if sizes[axis] > 1 or axis == "shard"),
        batch=BatchPlan(global_batch=BATCH, micro_batch=micro, accumulate=samples_per_rank // micro),
        schedule=SchedulePlan(name=draw.choice(pipelined if sizes["pipeline"] > 1 else ("1f1b", "breadth_first"))),
        experts=ExpertPlan(expert=expert, expert_shard=shard_ranks // expert) if spec.experts and expert > 1 else None,
        layers=tuple(_layers(draw, spec.layers)),
        precision=precision,
        gather_transport=draw.choice(("nccl", "nccl", "copy_engine")),
        tensor_transport="copy_engine" if sizes["tensor"] > 1 and draw.random() < 0.5 else "nccl",
        compile=compile,
    )


def _layers(draw: Random, layers: int) -> Iterator[LayerStrategy]:
    """Strategies of up to three ranges of layers; optimizer state is in host memory for all or for none."""
    cuts = sorted(draw.sample(range(1, layers), draw.choice((0, 0, 1, 2))))
    kinds = draw.choice((("none", "activations"), ("none", "none"), ("optimizer", "both")))
    for first, behind in pairwise([0, *cuts, layers]):
        yield LayerStrategy(
            range=f"{first}-{behind - 1}",
            reshard=draw.random() < 0.6,
            gradients=draw.choice(("shard", "whole")),
            recompute=draw.choice(RECOMPUTE_MODES),
            offload=draw.choice(kinds),
        )


def _refused(plan: Plan, spec: ModelSpec) -> bool:
    """Whether training would refuse the plan."""
    pipeline, accumulate = plan.axis_size("pipeline"), plan.batch.accumulate
    try:
        stages = len(stage_table(plan.schedule, pipeline, spec.layers)[0])
    except ValueError:
        return True
    experts = plan.axis_size("tensor") * (plan.experts.expert if plan.experts else 1)
    return bool(
        check_tensor(spec, plan.axis_size("tensor"), SEQ)
        or check_context(spec, plan, SEQ)
        or (spec.experts and spec.experts % experts)
        or refusal(plan.schedule.name, pipeline, accumulate, stages)
        or untrainable(plan)
    )
