"""`Shape`: what a decoder's blocks compute and store, as columns. Each column is a number for one model, or an array for many models.

Only `shape_of_runs` makes these columns from block tables. The blocks belong to models of this program (`shape_of`), or to published models
that this program cannot build (`calibration`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from meshwright.spec.blocks.attention import MASK_BLOCK, window_by_flash
from meshwright.spec.blocks.block import BlockSpec
from meshwright.spec.blocks.feed_forward import FeedForwardSpec
from meshwright.spec.blocks.memory import Elements, activations, saved
from meshwright.spec.blocks.moe import MoESpec
from meshwright.spec.blocks.table import AttendOp, ExpertsOp, LinearOp, Table, TensorSplit
from meshwright.spec.blocks.transfers import RankTransfers, transfers
from meshwright.spec.model import BlockRun, ModelSpec, parameter_count, sequence, trained_parameter_count
from meshwright.spec.plan import RECOMPUTE_MODES
from meshwright.workload.arrays import Array

Role = Literal["linear", "router", "expert", "adapter", "expert_adapter"]
T = TypeVar("T")


@dataclass(frozen=True)
class LinearColumns:
    """Linear layers of equal size in a model's blocks. The linear layers of all experts of a block count as one grouped linear layer."""

    role: Role
    """What the linear layer is for. Only `linear` layers use the plan's linear format; the others use the compute dtype.

    `adapter`: matrix A or B of a low-rank adapter. `expert_adapter`: matrix A or B of all experts' adapters.
    """
    split: TensorSplit
    """What tensor ranks divide: outputs (`rows`), inputs (`columns`), or the tokens, if every rank has the whole weight."""
    inputs: Array
    outputs: Array
    layers: Array
    """Number of the model's layers that have this linear layer."""


@dataclass(
    frozen=True, kw_only=True, eq=False
)  # a key of caches: a shape has arrays, and `shape_of` returns the same one again
class Shape:
    """Dimensions of a decoder, and what its blocks compute and store.

    Widths are for one token in one layer, over all heads. Fields that say "1 when" or "1 if" are 1 or 0.
    """

    layers: Array
    hidden: Array
    vocab: Array
    tied: Array
    """1 when the head shares the embedding's weights."""
    score: Array = 0.0
    """1 when the head gives one score in place of logits."""
    linears: tuple[LinearColumns, ...]
    """The distinct linear layers of the blocks."""
    heads: Array
    query_width: Array
    """heads × query-key head size."""
    value_width: Array
    """heads × value head size."""
    kv_width: Array
    """Keys and values together, as they are saved and exchanged."""
    attention_layers: Array
    full_attention: Array
    """Number of attention scores in layers without a window, relative to full causal attention in all layers with attention.

    In published models, layers with a long window count as layers without a window, and layers with a short window count 0.
    """
    windowed_scores: Array
    """Number of attention scores that layers with a window compute, relative to full causal attention in all layers with attention.

    They compute more scores than the window has, because kernels compute whole blocks (`computed_span`). Layers that cap scores count here
    too, because the same kernel computes them; without a window, their window is the whole sequence.
    """
    flash_layers: Array
    """Share of the layers with attention whose windows FlashAttention computes in 16 bit (`window_by_flash`)."""
    flash_scores: Array
    """The part of `windowed_scores` that belongs to the layers of `flash_layers`."""
    capped: Array
    """1 if scores have a cap, else 0."""
    added_norms: Array
    """Norms of the hidden size that a block has in addition to the usual two (before mixer and feed-forward), mean over layers."""
    ffn: Array
    """Width of dense feed-forward layers."""
    dense_layers: Array
    moe_layers: Array
    experts: Array
    top_k: Array
    expert_ffn: Array
    shared_ffn: Array
    expert_in: Array
    """Width an expert reads and writes (hidden, unless experts work in a smaller space)."""
    gated: Array
    """1 when a feed-forward layer has a gate matrix beside up and down."""
    gathers: Array
    """Number of all-gathers of the hidden size between tensor ranks, in one forward of all layers."""
    scatters: Array
    """Number of reduce-scatters of the hidden size between tensor ranks, in one forward of all layers."""
    narrow_gathers: Array
    """Number of all-gathers of latents between tensor ranks, in one forward of all layers (`layer_messages.latent_messages`)."""
    narrow_width: Array
    """Width of the latents in each of these all-gathers."""
    summed_norms: Array
    """Number of layers that normalise queries and keys over all heads together, so tensor ranks all-reduce sums of squares."""
    saved: Array
    """Elements per token that a block saves for its backward, mean over layers.

    The dimensions are: recompute mode, whether inputs of linear layers are saved in fp8 (0 or 1), whether experts are on several ranks
    (0 or 1), and the fields of `Elements`.
    """
    activated: Array
    """Elements per token in the inputs of activation functions outside of routed experts, mean over layers."""
    expert_activated: Array
    """Elements per token in the inputs of activation functions in routed experts, over all experts of the token, mean over layers."""
    expert_rows: Array
    """Elements per token in the inputs of routed experts, over all experts of the token, mean over layers."""
    tiled: Array
    """Elements per token of the feed-forward tensors that recomputation can compute in tiles.

    They are the inputs of activation functions, their gradients, and the outputs.
    """
    tiled_weights: Array
    """Weights of the largest feed-forward network that can be computed in tiles."""
    mixer_layers: Array = 0.0
    """State-space or linear-attention layers."""
    expert_bias: Array = 0.0
    """1 when experts have biases."""
    kv_head_width: Array = 0.0
    """Width of keys and values of one head; 0 if unknown."""
    padding: Array = 0.0
    """Width by which context ranks pad values to that of keys."""
    frozen: Array = 0.0
    """1 when all weights but those of adapters are frozen: they have no gradients."""
    trained: Array = 1.0
    """Share of the model's parameters that are trained."""
    predictions: Array = 0.0
    """Modules after the layers that predict further tokens."""
    module_params: Array = 0.0
    """Weights of a prediction module outside its routed experts."""
    module_expert_params: Array = 0.0
    """Weights of the routed experts of a prediction module."""

    @property
    def dense_params(self) -> Array:
        """Weights of all layers outside the routed experts."""
        dense = sum(
            linear.layers * linear.inputs * linear.outputs for linear in self.linears if linear.role != "expert"
        )
        # If experts work in a smaller space, two projections lead there and back. They are counted here, but not in the fitted times.
        return dense + self.moe_layers * 2 * self.hidden * self.expert_in * (self.expert_in < self.hidden)

    @property
    def expert_params(self) -> Array:
        """Weights of all routed experts of all layers."""
        experts = sum(
            linear.layers * linear.inputs * linear.outputs for linear in self.linears if linear.role == "expert"
        )
        return self.experts * experts

    @property
    def inner_dense_params(self) -> Array:
        """`dense_params` with those of prediction modules."""
        return self.dense_params + self.predictions * self.module_params

    @property
    def inner_expert_params(self) -> Array:
        """`expert_params` with those of prediction modules."""
        return self.expert_params + self.predictions * self.module_expert_params

    @property
    def table_params(self) -> Array:
        """Weights of the embedding."""
        return self.vocab * self.hidden

    @property
    def outputs(self) -> Array:
        """Numbers that the head computes of a token."""
        return self.vocab + self.score * (1 - self.vocab)

    @property
    def end_params(self) -> Array:
        """Weights of the embedding and of a head of its own."""
        return self.table_params + (1 - self.tied) * self.outputs * self.hidden

    @property
    def params(self) -> Array:
        return self.dense_params + self.expert_params + self.end_params


def embedding_at_both_ends(shape: Shape) -> Array:
    """Return 1 for models whose last stage also uses the embedding's weight (`ModelSpec.embedding_at_both_ends`), else 0."""
    return np.maximum(shape.tied, np.asarray(shape.predictions) > 0)


@lru_cache(maxsize=64)
def shape_of(model: ModelSpec, seq_len: int, *, kind: int | None = None) -> Shape:
    """Return the columns of a model of this program. With `kind`, all blocks count as blocks of that kind (`ModelSpec.block_kinds`)."""
    runs = sequence(model) if kind is None else (BlockRun(model.block_kinds[kind], 0, model.layers),)
    module = model.block(model.layers).table()
    module_experts = sum(op.inputs * op.outputs * op.experts for op in module.operations if isinstance(op, ExpertsOp))
    module_dense = sum(op.inputs * op.outputs for op in module.operations if isinstance(op, LinearOp))
    return replace(
        shape_of_runs(tuple((run.block, run.count) for run in runs), layers=model.layers, seq_len=seq_len),
        vocab=model.vocab_size,
        tied=float(model.tied),
        score=float(model.head == "score"),
        frozen=float(model.adapter is not None),
        trained=trained_parameter_count(model) / parameter_count(model),
        predictions=model.prediction_depth,
        module_params=2 * model.hidden**2 + module_dense,
        module_expert_params=module_experts,
    )


@lru_cache(maxsize=1024)  # tables of published runs repeat a few models
def shape_of_runs(runs: tuple[tuple[BlockSpec, float], ...], *, layers: float, seq_len: int) -> Shape:
    """Return the columns of `layers` layers, without embedding and head. `runs` has pairs (block, number of layers with this block).

    All attention layers must be equal except for their windows, all dense feed-forward networks except for their widths, and all MoE layers
    must be equal.
    """
    attends = [(op, count) for block, count in runs for op in block.table().attends if count]
    dense = [(body, n) for block, n in runs for body in block.bodies if isinstance(body, FeedForwardSpec) and n]
    moe = _only((body, n) for block, n in runs for body in block.bodies if isinstance(body, MoESpec))
    memory = [(activations(block.table()), count / layers) for block, count in runs]
    moved = [(transfers(block), count) for block, count in runs]
    return Shape(
        layers=layers,
        hidden=runs[0][0].hidden,
        vocab=0,
        tied=0.0,
        linears=_linears(runs),
        added_norms=sum(count / layers * _added_norms(block) for block, count in runs),
        **_attention_columns(attends, seq_len),
        **_feed_forward_columns(dense, moe.value, runs[0][0].hidden),
        moe_layers=moe.layers,
        **_transfer_columns(moved, runs[0][0].hidden),
        saved=sum(count / layers * _saved_elements(block) for block, count in runs),
        activated=sum(share * block.before.own for block, share in memory),
        expert_activated=sum(share * block.before.received for block, share in memory),
        expert_rows=sum(share * block.rows.received for block, share in memory),
        tiled=sum(share * block.tiled for block, share in memory),
        tiled_weights=max((block.tiled_weights for block, share in memory if share), default=0.0),
    )


@dataclass(frozen=True)
class _Only(Generic[T]):
    """A value that all blocks of a model share if they have it at all, and the number of layers that have it; None in 0 layers."""

    value: T | None
    layers: float


def _only(found: Iterable[tuple[T, float]]) -> _Only[T]:
    values = [(value, count) for value, count in found if count]
    assert len({value for value, _ in values}) <= 1, "kinds of layers share heads and experts (`KindSpec`)"
    return _Only(values[0][0] if values else None, sum(count for _, count in values))


def _attention_columns(attends: Sequence[tuple[AttendOp, float]], seq_len: int) -> dict[str, Any]:
    """The fields of `Shape` about attention: sizes of heads, and scores with windows relative to full causal ones."""
    only = _only(((op.heads, op.kv_heads, op.key_dim, op.value_dim), count) for op, count in attends)
    layers = only.layers
    if only.value is None:
        names = (
            "heads",
            "query_width",
            "value_width",
            "kv_width",
            "full_attention",
            "windowed_scores",
            "flash_layers",
            "flash_scores",
            "capped",
            "attention_layers",
        )
        return dict.fromkeys(names, 0.0)
    heads, kv_heads, key_dim, value_dim = only.value
    windows = [
        (window, _by_flash(op, window), count / layers)
        for op, count in attends
        if (window := min(op.window or seq_len, seq_len)) < seq_len or op.cap is not None
    ]
    return {
        "attention_layers": layers,
        "heads": heads,
        "query_width": heads * key_dim,
        "value_width": heads * value_dim,
        "kv_width": kv_heads * (key_dim + value_dim),
        "kv_head_width": 2 * key_dim,
        "padding": kv_heads * (key_dim - value_dim),
        "full_attention": 1 - sum(share for _, _, share in windows),
        "windowed_scores": sum(share * _relative_scores(window, seq_len) for window, _, share in windows),
        "flash_layers": sum(share for _, flash, share in windows if flash),
        "flash_scores": sum(share * _relative_scores(window, seq_len) for window, flash, share in windows if flash),
        "capped": float(any(op.cap is not None for op, _ in attends)),
    }


def _by_flash(op: AttendOp, window: int) -> bool:
    """Whether FlashAttention computes the operation in 16 bit."""
    return op.key_dim == op.value_dim and window_by_flash(op.key_dim, window, op.cap, "bf16")


def _relative_scores(window: int, seq_len: int) -> float:
    """Scores that a layer with a window computes, relative to full causal attention."""
    return 2 * computed_span(window, seq_len) / seq_len


def computed_span(window: int, seq_len: int) -> float:
    """Mean number of keys for which attention with a window computes a query's score: whole blocks of the mask.

    Example: of 4,096 tokens with a window of 1,024 a block of 128 queries has up to 9 blocks of keys, at the start fewer: 1,008 keys on
    average, of which the window has 896.

    The same by this function:

    >>> computed_span(window=1024, seq_len=4096)
    1008.0
    """
    blocks = -(-seq_len // MASK_BLOCK)
    most = min(blocks, (window + MASK_BLOCK - 2) // MASK_BLOCK + 1)
    return (blocks - (most - 1) / 2) * most / blocks * MASK_BLOCK


def _feed_forward_columns(
    dense: Sequence[tuple[FeedForwardSpec, float]], moe: MoESpec | None, hidden: float
) -> dict[str, Any]:
    """The fields of `Shape` about feed-forward networks: the dense width, and number and widths of experts."""
    networks = [*(body for body, _ in dense), *((moe.expert,) if moe is not None else ())]
    layers = sum(count for _, count in dense)
    return {
        "gated": float(any(network.gated for network in networks)),
        "ffn": sum(count * body.width for body, count in dense) / layers if layers else 0,
        "dense_layers": layers,
        "experts": moe.experts if moe is not None else 0,
        "top_k": moe.per_token if moe is not None else 0,
        "expert_ffn": moe.expert.width if moe is not None else 0,
        "shared_ffn": moe.shared.width if moe is not None and moe.shared is not None else 0,
        "expert_in": (moe and moe.width) or hidden,
    }


def _transfer_columns(moved: Sequence[tuple[RankTransfers, float]], hidden: float) -> dict[str, Any]:
    """Gathers and scatters over tensor ranks. Those of one body that follow each other count as one if some are narrow."""
    groups = [
        (sum(value.width for value in group), len(group), count) for moves, count in moved for group in moves.gathered
    ]
    narrow = [(width, count) for width, values, count in groups if width != values * hidden]
    return {
        "gathers": sum(values * count for width, values, count in groups if width == values * hidden),
        "scatters": sum(len(moves.scattered) * count for moves, count in moved),
        "narrow_gathers": sum(count for _, count in narrow),
        "narrow_width": _only(narrow).value or 0.0,
        "summed_norms": sum(count for moves, count in moved if moves.squares),
    }


def _added_norms(block: BlockSpec) -> int:
    return max(0, sum(1 + (sublayer.norm_out is not None) for sublayer in block.sublayers) - 2)


def _linears(runs: Sequence[tuple[BlockSpec, float]]) -> tuple[LinearColumns, ...]:
    """The distinct linear layers of blocks, with the layers that have them."""
    layers: dict[tuple[Role, TensorSplit, float, float], float] = {}
    for block, count in runs:
        for op in block.table().operations:
            if isinstance(op, ExpertsOp):
                key: tuple[Role, TensorSplit, float, float] = ("expert", "whole", op.inputs, op.outputs)
            elif isinstance(op, LinearOp):
                key = ("router" if op.router else "linear", op.split, op.inputs, op.outputs)
            else:
                continue
            layers[key] = layers.get(key, 0) + count
            for adapter in _adapters(op):
                layers[adapter] = layers.get(adapter, 0) + count
    return tuple(LinearColumns(*key, layers=count) for key, count in layers.items() if count)


def _adapters(op: LinearOp | ExpertsOp) -> tuple[tuple[Role, TensorSplit, float, float], ...]:
    """The A and the B of a linear layer's adapters as linear layers: all parts together (`kernels.adapter`).

    Tensor ranks apply what they do not divide to their own tokens (`parallel.linear_exchanges`).
    """
    if not op.adapters:
        return ()
    ranks = sum(part.rank for part in op.adapters)
    if isinstance(op, ExpertsOp):
        return ("expert_adapter", "whole", op.inputs, ranks), ("expert_adapter", "whole", ranks, op.outputs)
    a: TensorSplit = "columns" if op.split == "columns" else "whole"
    b: TensorSplit = "rows" if op.split == "rows" else "whole"
    return ("adapter", a, op.inputs, ranks), ("adapter", b, ranks, op.outputs)


def _saved_elements(block: BlockSpec) -> np.ndarray:
    """The elements that a block saves, by mode, format of linear layers (0: the compute dtype) and spread of experts."""

    def row(elements: Elements) -> list[float]:
        return [elements.own, elements.rounded, elements.received]

    tables: list[Table] = [block.table(spread=spread) for spread in (False, True)]
    return np.array(
        [
            [[row(saved(table, mode, narrow=narrow)) for table in tables] for narrow in (False, True)]
            for mode in RECOMPUTE_MODES
        ],
        dtype=np.float64,
    )
