"""Memory of the fullest rank in closed form, for arrays of layouts, whose layers are equal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.spec.model import ModelSpec
from meshwright.workload.activations import (
    mean_backward_elements,
    mean_saved_elements,
    tile_share,
    tile_sum_bytes,
)
from meshwright.workload.arrays import Array
from meshwright.workload.buffers import DEVICE_LAYERS
from meshwright.workload.layouts import Layouts
from meshwright.workload.model_shape import shape_of
from meshwright.workload.tensor_bytes import (
    RankTensors,
    TensorFormats,
    bytes_by_category,
    peak_bytes,
    rank_tensors,
)
from meshwright.workload.unit_parameters import EndParameters, block_unit, end_units, trained_share


def layout_memory(model: ModelSpec, layout: Layouts, formats: TensorFormats) -> dict[str, Array]:
    """Return the bytes of each memory category on the pipeline rank that needs the most, under each layout.

    Two ranks are compared: the first and the last pipeline rank. `transfers` is 0 without a pipeline. Each layer of a model counts as the
    mean of its layers.
    """
    first, last = (
        bytes_by_category(_rank_tensors(model, layout, formats, last=is_last), formats) for is_last in (False, True)
    )
    fuller = sum(last.values()) > sum(first.values())
    return {category: np.where(fuller, last[category], first[category]) for category in first}


def layout_peak_bytes(model: ModelSpec, layout: Layouts, formats: TensorFormats) -> Array:
    """Return the total bytes of the pipeline rank that needs the most, under each layout; faster than `layout_memory`."""
    first, last = (
        peak_bytes(_rank_tensors(model, layout, formats, last=is_last), formats) for is_last in (False, True)
    )
    return np.maximum(first, last)


def _rank_tensors(model: ModelSpec, layout: Layouts, formats: TensorFormats, *, last: bool) -> RankTensors:
    """Return what the first pipeline rank (with `last`, the last one) stores and gathers, for many layouts at once.

    Tensor ranks divide all parameters. A rank owns a shard of its parameters, and gathers whole units. `plan_bytes` counts the same for
    one plan, layer by layer.
    """
    sizes = _model_parameters(model)
    width = np.asarray(layout.tensor)
    shards = np.asarray(layout.shards)
    embed_head, head, shared = _end_parameters(sizes.embed_head, layout, model.embedding_at_both_ends, last)
    layers = np.where((np.asarray(layout.vee) > 0) == last, layout.fullest_layers, layout.head_layers)
    owned = (layers * sizes.block / width + embed_head) / shards
    # A rank all-gathers only the experts of its own expert rank, so the others are subtracted.
    other_ranks = 1 - 1 / np.maximum(1.0, layout.expert / width)
    block = (sizes.block - sizes.experts * other_ranks) / width
    experts_on_other_ranks = np.where(head > 0, sizes.embed_head.final.experts / width * other_ranks, 0.0)
    embed_head = embed_head - experts_on_other_ranks
    head = head - experts_on_other_ranks
    embed_head_trained = trained_share(model, None)
    owned_trained = (owned - embed_head / shards) * sizes.trained + embed_head / shards * embed_head_trained
    whole_trained = layers * block * sizes.trained + embed_head * embed_head_trained
    activation_bytes = layout.micro_batch * layout.seq / layout.context / width * formats.compute
    shape = shape_of(model, 1)
    saved = mean_saved_elements(shape, layout.recompute, formats.low, layout.expert, layout.busiest_rows)
    share = tile_share(formats.mlp_tile, activation_bytes / formats.compute)
    temporary = mean_backward_elements(shape, layout.recompute, formats.low, layout.expert, layout.busiest_rows, share)
    temporary = temporary + tile_sum_bytes(shape, layout.recompute, share, formats.compute) / activation_bytes
    on_device = np.minimum(DEVICE_LAYERS + (np.asarray(layout.pipeline) > 1), layers)
    offloaded = np.asarray(layout.offload_activations)
    in_flight = layout.in_flight_last if last else layout.in_flight
    stored_layers = np.where(offloaded > 0, on_device, 0.0) + (1 - offloaded) * in_flight * layers
    return rank_tensors(
        model,
        layout,
        formats,
        owned=owned,
        block=block,
        embed_head=embed_head,
        head=head,
        trained=sizes.trained,
        embed_head_trained=embed_head_trained,
        layers_gathered_once=np.where(layout.gather_once > 0, layers, 0.0),
        embed_gathered_once=layout.gather_once,
        last=np.where((head > 0) & ~shared, head, block),
        summed=np.where(layout.reduce_once > 0, 0.0, owned_trained),
        whole=np.where(layout.reduce_once > 0, whole_trained, 0.0),
        offloaded_share=layout.offload,
        layers=layers,
        activations=stored_layers * activation_bytes * saved,
        temporary=activation_bytes * temporary,
        module_elements=(saved, temporary),
        sends=_sends(layout, last),
    )


def _end_parameters(
    parameters: EndParameters, layout: Layouts, used_by_both: bool, last: bool
) -> tuple[Array, Array, Array]:
    """Return the parameters of embedding and head on the first rank, or with `last` on the last rank:

    (parameters of embedding and head together, parameters of the unit with head and loss, whether embedding and head are one unit).
    """
    single = np.asarray(layout.pipeline) == 1
    first_has_both = single | (np.asarray(layout.vee) > 0)
    has_head = single | ~first_has_both if last else first_has_both
    has_embed = single if last else np.ones_like(single)
    shared = has_head & has_embed & used_by_both
    table_copy = np.where(has_head & ~has_embed & used_by_both, parameters.table.count, 0.0)
    embed_head = has_embed * parameters.embed.count + has_head * parameters.final.count + table_copy
    loss = has_head * parameters.final.count + table_copy + np.where(shared, parameters.embed.count, 0.0)
    return embed_head / layout.tensor, loss / layout.tensor, shared


@dataclass(frozen=True)
class _ModelParameters:
    """Parameters of a model on one rank without any division. Those of a block are the mean over layers."""

    block: float
    """Parameters of a block, with its routed experts."""
    experts: float
    """Parameters of a block's routed experts."""
    trained: float
    """Share of the blocks' parameters that is trained."""
    embed_head: EndParameters


@lru_cache(maxsize=8)  # a sweep asks for one model thousands of times
def _model_parameters(model: ModelSpec) -> _ModelParameters:
    blocks = [block_unit(model, kind=model.kind(layer)) for layer in range(model.layers)]
    counts = sum(block.count for block in blocks)
    experts = sum(block.experts for block in blocks)
    trained = sum(block.count * trained_share(model, model.kind(layer)) for layer, block in enumerate(blocks)) / counts
    return _ModelParameters(counts / model.layers, experts / model.layers, trained, end_units(model))


def _sends(layout: Layouts, last: bool) -> Array:
    """Return how many messages of one micro-batch the first (or `last`) pipeline rank sends, activations and gradients together.

    With s stages on each rank it is 2 s - 1. In a V-shaped placement, the first rank sends s messages, and the last rank 2 s - 2.

    >>> from types import SimpleNamespace
    >>> _sends(SimpleNamespace(virtual=[1, 2], vee=0), last=True)
    array([1., 3.])
    """
    stages = np.asarray(layout.virtual, float)
    return np.where(np.asarray(layout.vee) > 0, 2 * stages - 2 if last else stages, 2 * stages - 1)
