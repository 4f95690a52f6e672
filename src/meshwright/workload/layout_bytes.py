"""Memory of the fullest rank by category in closed form, for arrays of layouts: `plan_bytes` without a Plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.plan import RECOMPUTE_MODES
from meshwright.workload.activations import (
    backward_elements,
    exchanged_expert_elements,
    received_elements,
    saved_elements,
)
from meshwright.workload.arrays import Array
from meshwright.workload.buffers import DEVICE_LAYERS
from meshwright.workload.layouts import Layouts
from meshwright.workload.tensor_bytes import Formats, RankTensors, bytes_by_category


def layout_memory(model: ModelSpec, layout: Layouts, f: Formats) -> dict[str, Array]:
    """Bytes by category of the fuller of two pipeline ranks: the one that holds the head, and the fullest of the others.

    `transfers` is 0 without a pipeline. Layers of a mixture count at their mean.
    """
    columns = [bytes_by_category(_held(model, layout, f, last=last), f) for last in (False, True)]
    first, second = (sum(kinds.values()) for kinds in columns)
    return {kind: np.where(second > first, columns[1][kind], columns[0][kind]) for kind in columns[0]}


def _held(model: ModelSpec, layout: Layouts, f: Formats, *, last: bool) -> RankTensors:
    sizes, width, m = _sizes(model, float(f.low)), np.asarray(layout.tensor), layout.micro_batches
    lone, shards = np.asarray(layout.pipeline) == 1, np.asarray(layout.shards)
    ends, loss, shared = _ends(sizes, layout, model.tied, last)
    block = (sizes.block - sizes.experts * (1 - 1 / np.maximum(1.0, layout.expert / width))) / width
    layers = np.where((np.asarray(layout.vee) > 0) == last, layout.fullest_layers, layout.head_layers)
    owned = (layers * sizes.block / width + ends) / shards
    tokens = layout.micro_batch * layout.seq / layout.context / width
    mode = np.asarray(layout.recompute, dtype=np.int64)
    kept = tokens * f.compute * np.choose(mode, np.broadcast_arrays(*sizes.kept))
    kept = kept + tokens * f.compute * sizes.travelled * (
        (mode == RECOMPUTE_MODES.index("selective")) & (layout.expert > 1)
    )
    forwards, forwards_first = _forwards(layout, last)
    staying = np.minimum(DEVICE_LAYERS + (np.asarray(layout.pipeline) > 1), layers)
    moved = np.asarray(layout.offload_activations)
    alive = np.where(moved > 0, staying, 0.0) + (1 - moved) * forwards * layers
    working = np.choose(mode, np.broadcast_arrays(*sizes.worked)) + received_elements(model, width, layout.context)
    piled = np.where(layout.layered > 0, m, 0.0)
    whole = (np.asarray(layout.reduce_once) > 0) & (m > 1)
    sums = np.where(whole & (shards > 1), (layers * block + ends) * f.reduce, owned * f.stored)
    return RankTensors(
        owned=owned, block=block, ends=ends, head=loss, shards=shards,
        gathers=np.where((shards == 1) & (layout.data <= 1) & (f.compute >= f.stored), 0.0, 1.0),
        kept=np.where(layout.gather_once > 0, layers, 0.0), ends_kept=layout.gather_once,
        last=np.where((loss > 0) & ~shared, loss, block), sums=np.where((piled > 0) | (m <= 1), 0.0, sums),
        reduces=np.where(~whole | (lone & ~forwards_first) | (piled > 0), 1.0, 0.0), offloaded_share=layout.offload, layers=layers,
        alive=alive * kept, working=tokens * f.compute * working, tokens=tokens, width=width, hidden=model.hidden,
        vocab=model.vocab_size, gradients_final=layout.gradients_final_in_backward(model.tied), pending=piled,
        pending_head=np.where(forwards_first, m, np.maximum(1.0, piled)),
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
            sum(saved_elements(model, layer, mode, low) for layer in layers) / model.layers for mode in RECOMPUTE_MODES
        ),
        worked=tuple(
            sum(backward_elements(model, layer, mode, low) for layer in layers) / model.layers
            for mode in RECOMPUTE_MODES
        ),
        travelled=sum(exchanged_expert_elements(model, layer, "selective", 2) for layer in layers) / model.layers,
    )


def _sends(layout: Layouts, last: bool) -> Array:
    """Messages of one micro-batch that an end of the pipeline sends; in a V only the last rank sends at the turn."""
    stages = np.asarray(layout.virtual, float)
    return np.where(np.asarray(layout.vee) > 0, 2 * stages - 2 if last else stages, 2 * stages - 1)
