"""Bytes of the fullest rank by kind, in closed form, for arrays of layouts at once.

`planned` is the account that `memory.py` keeps of a Plan, for layouts that are not written out as plans yet: the same arithmetic, with
counts of layers and micro-batches in closed form. `footprint` is for other software: what a stack keeps is one set of constants a stack.
Formulas and sources: docs/design/cost-model.md, "Memory".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.costs.account import Formats, Held, account
from meshwright.costs.constants import table
from meshwright.costs.inputs import ALL_BUT_ATTENTION, Array, Layouts, Shape
from meshwright.costs.stage_layers import stage_layers
from meshwright.spec.layout import balanced_stages
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.plan import RECOMPUTES
from meshwright.workload.activations import exchanged_per_token, kept_per_token, travelled_per_token, worked_per_token
from meshwright.workload.buffers import LAYERS_STAYING

MOST_STAGES = 1 << 16
"""More virtual stages than a pipeline rank can have."""


def planned(model: ModelSpec, layout: Layouts, f: Formats, *, head: float = 0.5) -> dict[str, Array]:
    """Bytes by kind of the fuller of the first and the last pipeline rank of this program's runs.

    `layout` says in `in_flight`, `in_flight_last` and `vee` how the schedule holds micro-batches, in `gather_once` (weights stay gathered)
    and `reduce_once` (gradients whole) what a plan's layers do; `head` is how many layers the head's arithmetic equals, by which stages are
    cut. `transfers` is 0 without a pipeline. Layers of a mixture count at their mean.
    """
    columns = [account(_held(model, layout, f, head, last=last), f) for last in (False, True)]
    first, second = (sum(kinds.values()) for kinds in columns)
    return {kind: np.where(second > first, columns[1][kind], columns[0][kind]) for kind in columns[0]}


def _held(model: ModelSpec, layout: Layouts, f: Formats, head: float, *, last: bool) -> Held:
    sizes, width, m = _sizes(model, float(f.low)), np.asarray(layout.tensor), layout.micro_batches
    lone, shards = np.asarray(layout.pipeline) == 1, np.asarray(layout.shards)
    ends, loss, shared = _ends(sizes, layout, model.tied, last)
    block = (sizes.block - sizes.experts * (1 - 1 / np.maximum(1.0, layout.expert / width))) / width
    layers = _layers(model.layers, head, layout.pipeline, layout.virtual, layout.vee, last)
    owned = (layers * sizes.block / width + ends) / shards
    tokens = layout.micro_batch * layout.seq / layout.context / width
    mode = np.asarray(layout.recompute, dtype=np.int64)
    kept = tokens * f.compute * np.choose(mode, np.broadcast_arrays(*sizes.kept))
    kept = kept + tokens * f.compute * sizes.travelled * ((mode == RECOMPUTES.index("selective")) & (layout.expert > 1))
    forwards, forwards_first = _forwards(layout, last)
    staying = np.minimum(LAYERS_STAYING + (np.asarray(layout.pipeline) > 1), layers)
    moved = np.asarray(layout.offload_activations)
    alive = np.where(moved > 0, staying, 0.0) + (1 - moved) * forwards * layers
    working = np.choose(mode, np.broadcast_arrays(*sizes.worked)) + exchanged_per_token(model, width, layout.context)
    piled = np.where(layout.layered > 0, m, 0.0)
    whole = (np.asarray(layout.reduce_once) > 0) & (m > 1)
    sums = np.where(whole & (shards > 1), (layers * block + ends) * f.reduce, owned * f.stored)
    return Held(
        owned=owned, block=block, ends=ends, head=loss, shards=shards,
        gathers=np.where((shards == 1) & (layout.data <= 1) & (f.compute >= f.stored), 0.0, 1.0),
        kept=np.where(layout.gather_once > 0, layers, 0.0), ends_kept=layout.gather_once,
        last=np.where((loss > 0) & ~shared, loss, block), sums=np.where((piled > 0) | (m <= 1), 0.0, sums),
        reduces=np.where(~whole | (lone & ~forwards_first) | (piled > 0), 1.0, 0.0), away=layout.offload, layers=layers,
        alive=alive * kept, working=tokens * f.compute * working, tokens=tokens, width=width, hidden=model.hidden,
        vocab=model.vocab_size, stays=layout.gradients_stay(model.tied), piled=piled,
        piled_head=np.where(forwards_first, m, np.maximum(1.0, piled)),
        messages=np.where(lone, -1.0, _sends(layout, last)),
    )  # fmt: skip


def _ends(sizes: _Sizes, layout: Layouts, tied: bool, last: bool) -> tuple[Array, Array, Array]:
    """Of the rank: parameters of embedding and head, those of the unit with the loss, and whether one unit has both ends."""
    lone = np.asarray(layout.pipeline) == 1
    first_has_both = lone | (np.asarray(layout.vee) > 0)
    has_head = lone | ~first_has_both if last else first_has_both
    has_embed = lone if last else np.ones_like(lone)
    shared = has_head & has_embed & tied
    copy = np.where(has_head & ~has_embed & tied, sizes.table, 0.0)
    ends = has_embed * sizes.embed + has_head * sizes.final + copy
    loss = has_head * sizes.final + copy + np.where(shared, sizes.embed, 0.0)
    return ends / layout.tensor, loss / layout.tensor, shared


def _forwards(layout: Layouts, last: bool) -> tuple[Array, Array]:
    """Micro-batches whose forwards wait for their backwards, and whether all forwards come first, as GPipe has it."""
    m, depth = layout.micro_batches, np.asarray(layout.pipeline)
    rule = np.where(layout.layered > 0, m, np.minimum(m, 1.0 if last else depth))
    said = np.asarray(layout.in_flight_last if last else layout.in_flight)
    # The last rank of no other schedule holds that many.
    return np.where(said > 0, said, rule), (np.asarray(layout.in_flight_last) >= m) & (m > depth)


@dataclass(frozen=True)
class _Sizes:
    """Of a model, mean over layers."""

    block: float
    """Parameters of a block with all experts."""
    experts: float
    """Those of its routed experts."""
    table: float
    """Parameters of the token table."""
    final: float
    """Those of the unit that ends with the loss, without a tied table."""
    embed: float
    """Those of the embedding's unit."""
    kept: tuple[float, ...]
    """Elements a token that a block keeps, by recompute mode."""
    worked: tuple[float, ...]
    """Those that its backward holds beside them."""
    travelled: float
    """Elements a token that selective recompute keeps besides where its experts are on several ranks."""


@lru_cache(maxsize=8)  # a sweep asks about one model thousands of times
def _sizes(model: ModelSpec, low: float) -> _Sizes:
    rows, layers = parameters(model), range(model.layers)
    outside = [row for row in rows if not row.name.startswith("layers.")]
    embed = sum(row.count for row in outside if row.name.partition(".")[0] in ("embed", "positions"))
    ends = sum(row.count for row in outside)
    return _Sizes(
        block=(sum(row.count for row in rows) - ends) / model.layers,
        experts=sum(row.count for row in rows if row.expert) / model.layers,
        table=outside[0].count,
        final=ends - embed,
        embed=embed,
        kept=tuple(
            sum(kept_per_token(model, layer, mode, low) for layer in layers) / model.layers for mode in RECOMPUTES
        ),
        worked=tuple(
            sum(worked_per_token(model, layer, mode, low) for layer in layers) / model.layers for mode in RECOMPUTES
        ),
        travelled=sum(travelled_per_token(model, layer, "selective", 2) for layer in layers) / model.layers,
    )


def _layers(layers: int, head: float, depth: Array, virtual: Array, vee: Array, last: bool) -> Array:
    """Layers of the first or the last pipeline rank."""
    ranks, stages, vees = np.broadcast_arrays(*(np.asarray(x, dtype=np.int64) for x in (depth, virtual, vee)))
    kinds, where = np.unique((ranks * MOST_STAGES + np.maximum(1, stages)) * 2 + (vees > 0), return_inverse=True)
    counts = [_of_rank(layers, head, *divmod(int(kind) // 2, MOST_STAGES), bool(kind % 2), last) for kind in kinds]
    return np.array(counts, float)[where.reshape(-1)].reshape(ranks.shape)


@lru_cache(maxsize=4096)
def _of_rank(layers: int, head: float, pipeline: int, virtual: int, vee: bool, last: bool) -> int:
    if layers < pipeline * virtual:
        return -(-layers // pipeline)  # no such plan; whoever asks for many layouts at once drops it
    rows = balanced_stages("zbv" if vee else "interleaved", pipeline, layers, head, virtual)
    return sum(len(stage) for stage in rows[-1 if last else 0])


def _sends(layout: Layouts, last: bool) -> Array:
    """Messages of one micro-batch that an end of the pipeline sends: in a V the first rank turns at no border, the last at one a turn."""
    stages = np.asarray(layout.virtual, float)
    return np.where(np.asarray(layout.vee) > 0, 2 * stages - 2 if last else stages, 2 * stages - 1)


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """What a software stack keeps in memory."""

    held: Array
    """Bytes per parameter that every replica holds: weights and gradients, with their copies."""
    owned: Array
    """Bytes per parameter of master weights and moments."""
    sharding: Array
    """Further bytes per parameter of a shard where the optimizer is sharded: its gradients and exchange buffers."""
    wide: Array
    """Elements kept per token, layer and hidden element that tensor parallelism leaves whole, unless it splits the sequence."""
    hidden: Array
    """The same of hidden width that it splits in any case."""
    narrow: Array
    """The same relative to the widths it splits (attention inputs, feed-forward)."""
    live: Array
    """Elements per token and hidden element of the one layer that computes, never split: gathered inputs and their gradients."""
    logits: Array
    """Bytes per logit of one micro-batch."""
    gathered: Array
    """Fully sharded layers whose whole weights exist at once."""
    slack: Array
    """Reserved over needed: the allocator's fragments, as a share of activations."""
    base: Array
    """GiB of the framework, kernels and communicators."""
    base_rank: Array
    """GiB of communicators per axis in use."""


def keeping(stacks: list[str], given: dict[str, Any] | None = None) -> Keeping:
    """The memory constants of each row's stack, side by side; unknown stacks take `default`."""
    rows = given or table()["memory"]
    columns = [{**rows["default"], **rows.get(stack, {})} for stack in stacks]
    return Keeping(**{name: np.array([column[name] for column in columns]) for name in rows["default"]})


def footprint(shape: Shape, layout: Layouts, k: Keeping, first_only: Array = 0.0) -> dict[str, Array]:
    """Bytes by kind of the fuller of the first and the last stage: weights and gradients, optimizer, activations, and so on.

    `first_only` (1 or 0) asks for the first stage: what a run reports that looks at rank 0.
    """
    first = _stage(shape, layout, k, last=False)
    last = _stage(shape, layout, k, last=True)
    fuller = (sum(first.values()) > sum(last.values())) | (np.asarray(first_only) > 0)
    return {kind: np.where(fuller, first[kind], last[kind]) for kind in first}


def _stage(shape: Shape, layout: Layouts, k: Keeping, *, last: bool) -> dict[str, Array]:
    width, depth = layout.tensor, layout.pipeline
    lone = depth == 1
    full, final_layers = stage_layers(shape, layout)
    layers = np.where(lone, shape.layers, final_layers if last else full)
    part = layers / shape.layers
    tables = np.where(lone, 2.0 - shape.tied, 1.0) * shape.table_params
    dense = (shape.dense_params * part + tables) / width
    experts = shape.expert_params * part / np.maximum(layout.expert, 1.0)
    held, owned = (
        dense / np.where(sharded, layout.shards, 1.0) + experts / np.where(sharded, layout.expert_shard, 1.0)
        for sharded in (layout.zero >= 3, layout.zero >= 1)
    )
    block = (shape.dense_params + shape.expert_params / np.maximum(layout.expert, 1.0)) / shape.layers / width
    kept = np.where(layout.keep_gathered > 0, layers, k.gathered)
    tokens = layout.micro_batch * layout.seq / layout.context
    m = layout.micro_batches
    in_flight = np.minimum(
        m, np.where(lone | last, 1.0, depth * (1 + (depth - 1) / (depth * layout.virtual) * (layout.virtual > 1)))
    )
    whole = _kept_per_token(shape, layout, k)
    mode = np.asarray(layout.recompute, dtype=np.int64)
    attended = shape.attention_layers / shape.layers * shape.value_width
    least = 2.0 * shape.hidden / width
    per_layer = np.choose(mode, np.broadcast_arrays(whole, 0.8 * whole, least + 2.0 * attended / width, least))
    working = np.where(mode >= ALL_BUT_ATTENTION, whole, 0.0)
    # Offloaded, a rank has two layers of one micro-batch: the one that computes and the one on the link.
    held_layers = np.where(layout.offload_activations > 0, np.minimum(2.0, layers), layers * in_flight)
    activations = tokens * (per_layer * held_layers + working + 2.0 * k.live * shape.hidden)
    final = lone | last
    return {
        "weights_and_gradients": held * k.held,
        "optimizer": owned * (k.owned + np.where(layout.zero >= 1, k.sharding, 0.0)) * (1 - layout.offload),
        "gathered": np.where(layout.zero >= 3, (kept * block + shape.table_params / width) * 4.0, 0.0),
        "activations": activations * (1 + k.slack),
        "logits": np.where(final, tokens * shape.vocab / width * k.logits * np.where(m > 1, 1.0, 0.6), 0.0),
        "framework": (k.base + k.base_rank * _axes(layout)) * 2.0**30,
    }


def _kept_per_token(shape: Shape, layout: Layouts, k: Keeping) -> Array:
    """Bytes that autograd keeps of one layer for one token, on average over layers."""
    attention = shape.attention_layers * (shape.query_width + shape.kv_width + shape.value_width)
    feed = shape.dense_layers * (2 + shape.gated) * shape.ffn
    experts = shape.moe_layers * (2 + shape.gated) * (shape.shared_ffn + shape.top_k * shape.expert_ffn)
    split = (attention + feed + experts) / shape.layers
    wide = np.where(layout.sequence > 0, k.wide / layout.tensor, k.wide)
    return 2.0 * (wide * shape.hidden + (k.hidden * shape.hidden + k.narrow * split) / layout.tensor)


def _axes(layout: Layouts) -> Array:
    sizes = (layout.tensor, layout.pipeline, layout.data, layout.context, layout.expert)
    return sum((np.asarray(size) > 1).astype(np.float64) for size in sizes)
