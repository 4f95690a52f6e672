"""What the inference engine's number formats and fast paths require of a model."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.blocks.attention import AttentionSpec
from meshwright.spec.blocks.feed_forward import FeedForwardSpec
from meshwright.spec.blocks.table import ExpertsOp, LinearOp
from meshwright.spec.engine import WeightFormat
from meshwright.spec.fp8_limits import FP8_MULTIPLE
from meshwright.spec.model import ModelSpec

NOT_ROUNDED = "kv_up"
"""The linear layer of latent attention that is never rounded to 8 bits."""
MOST_EXPERTS = 1024
"""Maximum number of experts of a layer that one program of the router's kernel can hold in registers."""
MOST_COPIES = 64
"""Maximum number of experts of a token whose outputs the kernels of decodes can compute."""


def weights_error(spec: ModelSpec, weights: WeightFormat) -> str | None:
    """Return why the engine cannot round a model's weights to 8 bits on any device, as text; None if it can."""
    if spec.expert_bias or spec.mlp == "clamped_swiglu":
        return f"{weights} is not for experts with biases or clamped SwiGLU; use bf16"
    return None


def fp8_sizes_error(spec: ModelSpec, *, experts: bool = True) -> str | None:
    """Return why the sizes of a model's weights do not allow fp8 on a GPU, as text; None if they do.

    `experts` says whether the weights of routed experts are rounded too.
    """
    for block in spec.block_kinds:
        for op in block.table().operations:
            name = op.name.rpartition(".")[2]
            linear = isinstance(op, LinearOp) and not op.router and name != NOT_ROUNDED
            if not linear and not (experts and isinstance(op, ExpertsOp)):
                continue
            assert isinstance(op, LinearOp | ExpertsOp)
            if op.outputs % FP8_MULTIPLE or op.inputs % FP8_MULTIPLE:
                sizes = f"{op.outputs} × {op.inputs}"
                return f"fp8 weights need dimensions that are multiples of {FP8_MULTIPLE}, got {name} of {sizes}"
    return None


def invariant_error(spec: ModelSpec) -> str | None:
    """Return why the engine's results on a GPU cannot be independent of the batch, as text; None if they can."""
    if spec.kv_rank:
        return "invariant results with latent attention need a CPU: on a GPU no kernel has a fixed order for it"
    usual = spec.mlp == "swiglu" and not spec.expert_bias
    if spec.experts and not (usual and spec.experts <= MOST_EXPERTS and spec.experts_per_token <= MOST_COPIES):
        return (
            "invariant results of an MoE model on a GPU: expected SwiGLU without biases in bf16 or fp16 with at most "
            f"{MOST_EXPERTS} experts and {MOST_COPIES} of them for a token; use a CPU"
        )
    return None


def predictions_error(spec: ModelSpec, count: int) -> str | None:
    """Return why a model's own modules cannot propose `count` draft tokens, as text; None if they can."""
    if count <= spec.prediction_depth:
        return None
    return (
        f"mtp: each draft token needs a module for multi-token prediction, and the model has {spec.prediction_depth}; "
        f"expected at most that many draft tokens, got {count}"
    )


def single_decode_obstacle(spec: ModelSpec) -> str | None:
    """Return what of a model the fast path of a single decode on a CPU does not support, as text.

    The result is None if it supports the whole model.
    """
    return next((words for words, found in _beside_single_decodes(spec) if found), None)


def _beside_single_decodes(spec: ModelSpec) -> Iterator[tuple[str, bool]]:
    """Yield (what the fast path does not support, whether the model has it)."""
    block = spec.block(0)
    mixer = spec.block(0).mixer
    yield "layers that differ", len(spec.block_kinds) > 1
    yield (
        "factors or caps of embeddings and logits",
        (spec.embedding_scale != 1 or spec.logit_factor != 1 or spec.logit_cap is not None),
    )
    yield "learned positions", spec.positions == "learned"
    yield "LayerNorm, or norm weights minus one", spec.norm != "rmsnorm" or spec.norm_plus_one
    yield (
        "norms of outputs, factors of outputs, or parallel blocks",
        (not spec.input_norms or spec.output_norms or spec.residual_factor != 1 or spec.parallel_block),
    )
    yield "latent attention", not isinstance(mixer, AttentionSpec)
    yield (
        "experts, GELU, or biases of the feed-forward network",
        (
            not isinstance(block.feed_forward, FeedForwardSpec)
            or block.feed_forward.activation != "swiglu"
            or block.feed_forward.bias
        ),
    )
    if isinstance(mixer, AttentionSpec):
        yield (
            "rotation of a part of each head, of neighbours, or none",
            (mixer.rotary is None or not mixer.rotates_whole_heads),
        )
        yield "queries that grow with their position", mixer.rotary is not None and mixer.rotary.growth_length > 0
        yield "norms of all heads together, or behind rotation", mixer.whole_norm or mixer.rotated_norm
        yield (
            "a factor or a cap of scores, sinks, or a bias of attention's output",
            (mixer.query_factor != 1 or mixer.score_cap is not None or mixer.sinks or mixer.out_bias),
        )
