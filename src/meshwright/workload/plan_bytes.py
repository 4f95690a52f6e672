"""Memory of each pipeline rank under a plan, by category, in bytes.

Weights, gradients and optimizer state are exact. Activations count the tensors that autograd saves in a block with fused element-wise
operations (`workload.activations`), times the micro-batches that the schedule keeps in flight. `workload.tensor_bytes` adds gathered
weights, reduction buffers and temporary tensors. The framework's memory is a guess unless a profile gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import mul

import numpy as np

from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import gradients_final_in_backward, stage_table
from meshwright.spec.model import ModelSpec, parameters
from meshwright.spec.plan import (
    Accumulation,
    LayerStrategy,
    Plan,
    Precision,
    layer_of,
)
from meshwright.workload.activations import (
    busiest_rows,
    elements_per_token,
    exchange_room,
    tokens_of,
)
from meshwright.workload.buffers import DEVICE_LAYERS
from meshwright.workload.dtypes import GB, bytes_of, low_share, state_bytes, summed_bytes
from meshwright.workload.groups import copies_experts, experts_over, shard_size, stacked_experts
from meshwright.workload.layouts import division_of
from meshwright.workload.optimizer_work import OptimizerWork, optimizer_work
from meshwright.workload.stage_parts import StagePart, stage_part
from meshwright.workload.tensor_bytes import (
    CATEGORIES,
    TensorFormats,
    bytes_by_category,
    rank_tensors,
)
from meshwright.workload.unit_parameters import block_unit

FRAMEWORK_BYTES = {"cpu": 600 << 20, "cuda": 3 << 30}
"""Interpreter, library images, CUDA context, communicators and allocator slack of one rank (guess)."""


def formats(
    train: TrainSpec,
    precision: Precision,
    *,
    cpu: bool,
    model: ModelSpec | None = None,
    offload_fraction: float = 1.0,
    offload_staging: float = 0.0,
    accumulation: Accumulation = "device",
    mlp_tile: int = 0,
) -> TensorFormats:
    """Return the bytes per number of a run's tensors, and the sizes of its buffers.

    The optimizer is that of `train`, applied to `model`; without a model it is AdamW. `offload_staging` is in gigabytes.
    """
    work = OptimizerWork() if model is None else optimizer_work(model, train.optimizer)
    replica_dtype = precision.reduce_replicas
    compute_bytes = bytes_of(precision.compute)
    return TensorFormats(
        compute=compute_bytes,
        reduce=bytes_of(precision.reduce),
        frozen=1 if precision.linear == "fp8_tensorwise" else compute_bytes,
        stored=bytes_of(precision.stored),
        resident=bytes_of(precision.resident),
        travelling=bytes_of(replica_dtype) if replica_dtype and replica_dtype != precision.stored else 0,
        logit=compute_bytes + 4 if cpu else compute_bytes,
        chunk=train.loss_chunk,
        workspace=0 if cpu else TensorFormats.workspace,
        framework=FRAMEWORK_BYTES["cpu" if cpu else "cuda"],
        gathered=1 / compute_bytes if precision.gather == "fp8" else 1.0,
        low=low_share(precision, precision.linear),
        token_window=not cpu,
        block_states=work.block_states,
        embed_head_states=work.embed_head_states,
        widens=train.optimizer.name in ("sgd", "lamb"),
        largest_matrix=work.largest,
        matrix_elements=work.exchanged,
        matrices=work.matrices,
        average=train.ema_decay is not None,
        record=state_bytes(precision),
        offload_fraction=offload_fraction,
        staging=GB * offload_staging,
        mlp_tile=mlp_tile,
        summed=summed_bytes(precision, accumulation),
        sums_on_host=accumulation == "host",
        scores=train.deterministic and not cpu,
    )


def fullest_rank_memory(
    model: ModelSpec, train: TrainSpec, plan: Plan, *, cpu: bool, activation_peaks: Sequence[float] = ()
) -> dict[str, int]:
    """Return the bytes of each memory category on the pipeline rank that needs the most.

    The categories are weights, gradients, optimizer, ema (only with a moving average of the weights), gathered, activations, logits,
    transfers (only with a pipeline), framework. `activation_peaks` is as in `memory_by_rank`.
    """
    return fullest(memory_by_rank(model, train, plan, cpu=cpu, activation_peaks=activation_peaks))


def fullest(ranks: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return the categories of the rank whose bytes are the most in total."""
    return max(ranks, key=lambda categories: sum(categories.values()))


def allocated(categories: dict[str, int]) -> int:
    """Return the bytes of a rank's tensors, which can be compared with the peak that torch's allocator reports.

    The allocator does not see the framework's own memory, so that category is left out:

    >>> allocated({"parameters": 4, "activations": 3, "framework": 2})
    7
    """
    return sum(categories.values()) - categories["framework"]


def memory_by_rank(
    model: ModelSpec, train: TrainSpec, plan: Plan, *, cpu: bool, activation_peaks: Sequence[float] = ()
) -> tuple[dict[str, int], ...]:
    """Return the bytes of each memory category, for every pipeline rank.

    - `activation_peaks`: for each pipeline rank, the peak of `activation_bytes` under the schedule. Without it, a rank counts all
      micro-batches of its stages; if it finishes each micro-batch before the next one, it counts a single one.
    - Prediction modules have a category of their own, `predictions`: all that they add to a rank (parameters, optimizer state, a copy of
      the embedding, activations, gradients). The other categories are those of the model without these modules.
    - Layers with `offload: activations` (or `both`): the device stores the activations of two layers of one micro-batch, with a pipeline
      of three layers.
    - Layers with the optimizer in host memory: master weights and moments are there too. The device stores the shard of the weights in the
      compute dtype, the sum of their gradients, and staging buffers for a few chunks.
    """
    ranks = _memory_by_rank(model, train, plan, cpu, activation_peaks)
    if not model.prediction_depth:
        return ranks
    without = _memory_by_rank(replace(model, prediction_depth=0), train, plan, cpu, activation_peaks)
    return tuple(
        {**base, "predictions": sum(whole.values()) - sum(base.values())}
        for whole, base in zip(ranks, without, strict=True)
    )


def _memory_by_rank(
    model: ModelSpec, train: TrainSpec, plan: Plan, cpu: bool, activation_peaks: Sequence[float]
) -> tuple[dict[str, int], ...]:
    """Return `memory_by_rank`, where the bytes of prediction modules are spread over the other categories."""
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    number_formats = formats(
        train,
        plan.precision,
        cpu=cpu,
        model=model,
        offload_fraction=plan.offload_fraction,
        offload_staging=plan.offload_staging,
        accumulation=plan.accumulation,
    )
    tokens = tokens_of(train, plan)
    per_token = elements_per_token(model, plan, busiest_rows(model, train, plan), tokens)
    token_bytes = tokens * bytes_of(plan.precision.compute)
    columns = []
    for rank in range(len(table)):
        part = stage_part(model, plan.axis_size("tensor"), shard_size(plan), experts_over(plan), table, rank)
        peak = activation_peaks[rank] if activation_peaks else None
        columns.append(_sums_over_layers(model, plan, part, peak, token_bytes, per_token, number_formats))
    sums = {name: np.array([column[name] for column in columns], float) for name in columns[0]}
    step = division_of(train, plan, exchange_room(model, plan))
    module_elements = per_token(model.layers - 1)
    rank_parts = rank_tensors(model, step, number_formats, module_elements=module_elements, **sums)
    sizes = bytes_by_category(rank_parts, number_formats)
    left_out = {"transfers": len(table) == 1, "ema": train.ema_decay is None}
    categories = [category for category in CATEGORIES if not left_out.get(category)]
    by_rank = np.stack(np.broadcast_arrays(*(sizes[category] for category in categories)), axis=-1).round()
    return tuple(dict(zip(categories, map(int, rank_sizes), strict=True)) for rank_sizes in by_rank.tolist())


def optimizer_on_host(model: ModelSpec, plan: Plan, nodes: int) -> float:
    """Return the bytes of host memory per node for optimizer state that is offloaded."""
    if not any(layer.optimizer_offloaded for layer in plan.layers):
        return 0.0
    strategies = plan.strategies(model.layers)
    offloaded = sum(count for layer, count in _trained_by_layer(model).items() if strategies[layer].optimizer_offloaded)
    return offloaded * plan.axis_size("replicate") * plan.offload_fraction * state_bytes(plan.precision) / nodes


def gradient_sums_on_host(model: ModelSpec, plan: Plan, nodes: int) -> float:
    """Return the bytes of host memory per node for gradients that are summed over micro-batches in host memory."""
    if plan.accumulation != "host":
        return 0.0
    strategies = plan.strategies(model.layers)
    summed = sum(count for layer, count in _trained_by_layer(model).items() if plan.sums_shards(strategies[layer]))
    return summed * plan.axis_size("replicate") * summed_bytes(plan.precision, "host") / nodes


@lru_cache(maxsize=64)
def _trained_by_layer(model: ModelSpec) -> dict[int, int]:
    """Return how many trained parameters have the strategy of each layer.

    The embedding and the head have the strategy of a layer next to them, and count there (`spec.plan.layer_of`).
    """
    counts: dict[int, int] = {}
    for parameter in parameters(model):
        if not parameter.frozen:
            layer = layer_of(parameter.name, model.layers)
            counts[layer] = counts.get(layer, 0) + parameter.count
    return counts


def _sums_over_layers(
    model: ModelSpec,
    plan: Plan,
    part: StagePart,
    activation_peak: float | None,
    token_bytes: float,
    per_token: Callable[[int], tuple[float, float]],
    number_formats: TensorFormats,
) -> dict[str, float]:
    """Return the arguments of `rank_tensors` for one pipeline rank, counted from its layers and their strategies.

    - `part`: the parameters of the rank.
    - `activation_peak`: bytes of saved activations on the device at the peak, without those of layers that offload. If it is None, the
      rank saves those of one micro-batch (or of a pair) where it finishes each before the next one begins, else of all.
    - `token_bytes`: bytes of a micro-batch's tokens, if each has one element.
    - `per_token(layer)`: (elements per token that a layer saves, temporary elements per token of its backward).
    """
    all_strategies = plan.strategies(model.layers)
    strategies = [all_strategies[layer] for layer in part.layers]
    shards = shard_size(plan)
    embed = part.embed_head - part.head
    # The embedding has the strategy of the first layer, the head that of the last one.
    units = [
        *zip(strategies, part.blocks, part.shards, part.trained, strict=True),
        (all_strategies[0], embed, embed / shards, part.embed_head_trained),
        (all_strategies[-1], part.head, part.head / shards, part.embed_head_trained),
    ]

    def saved_bytes(*, on_host: bool) -> list[float]:
        return [
            token_bytes * per_token(layer)[0]
            for layer, strategy in zip(part.layers, strategies, strict=True)
            if strategy.activations_offloaded == on_host
        ]

    if activation_peak is None:
        in_turn = plan.axis_size("pipeline") == 1 and plan.schedule.name not in ("gpipe", "breadth_first")
        micro_batches = 1 + plan.paired if in_turn else plan.batch.accumulate
        activation_peak = micro_batches * sum(saved_bytes(on_host=False))
    device_layers = DEVICE_LAYERS + (plan.axis_size("pipeline") > 1)
    block = max(part.blocks)
    layers_gathered_once = sum(not strategy.reshard for strategy in strategies)
    copied = 0.0
    if copies_experts(plan):
        copied, layers_gathered_once = _with_copies(model, plan, block, layers_gathered_once, len(part.layers))
    return {
        "owned": part.sharded,
        "block": block,
        "copied": copied,
        "embed_head": part.embed_head,
        "head": part.head,
        "trained": sum(map(mul, part.shards, part.trained)) / sum(part.shards),
        "embed_head_trained": part.embed_head_trained,
        "layers_gathered_once": layers_gathered_once,
        "embed_gathered_once": not all_strategies[0].reshard,
        "last": part.last,
        "summed": sum(shard * trained for strategy, _, shard, trained in units if strategy.gradients == "shard"),
        "whole": sum(count * trained for strategy, count, _, trained in units if strategy.gradients == "whole"),
        "offloaded_share": sum(shard for strategy, _, shard, _ in units if strategy.optimizer_offloaded)
        / sum(shard for _, _, shard, _ in units),
        "layers": len(part.layers),
        "activations": activation_peak + sum(sorted(saved_bytes(on_host=True))[-device_layers:]),
        "temporary": _temporary_bytes(model, plan, part, strategies, token_bytes, per_token, number_formats),
        "sends": part.sends,
    }


def _temporary_bytes(
    model: ModelSpec,
    plan: Plan,
    part: StagePart,
    strategies: Sequence[LayerStrategy],
    token_bytes: float,
    per_token: Callable[[int], tuple[float, float]],
    number_formats: TensorFormats,
) -> float:
    """Return the most bytes that temporary tensors of a block's backward add to the saved activations of all blocks.

    When the backward reaches a block, the later blocks have freed their saved activations, which leaves room for temporary tensors. But
    they have left their gradients; if their gathered weights were kept, a gradient can use the room of the weights. With several
    micro-batches, the sums of gradients exist already, so gradients need no new room.

    In layered order (all micro-batches run through a layer before the next layer), and with several stages on a rank, nothing counts as
    freed, because a forward between two backwards may fill the room again.
    """
    in_turn = part.stages == 1 and not plan.layered
    compute = float(number_formats.compute)
    if plan.batch.accumulate > 1:
        gradient = 0.0
    elif gradients_final_in_backward(model, plan):
        gradient = compute
    else:
        gradient = float(max(number_formats.reduce, number_formats.stored)) / shard_size(plan)
    largest = 0.0
    freed = 0.0
    for layer, strategy, block in reversed(list(zip(part.layers, strategies, part.blocks, strict=True))):
        saved, temporary = per_token(layer)
        largest = max(largest, token_bytes * temporary - max(freed, 0.0))
        if in_turn and not strategy.activations_offloaded:
            gathered_bytes = 0.0 if strategy.reshard else compute
            freed += token_bytes * saved - block * max(0.0, gradient - gathered_bytes)
    return largest


def _with_copies(
    model: ModelSpec, plan: Plan, block: float, layers_gathered_once: float, layers: int
) -> tuple[float, float]:
    """Return (parameters of the copies of experts in a gathered block, number of blocks that stay gathered for the step).

    `block` is the parameters of the largest block without copies.
    """
    assert plan.experts is not None
    unit = block_unit(
        model,
        kind=model.kind(model.layers - 1),
        tensor=plan.axis_size("tensor"),
        shards=shard_size(plan),
        expert=experts_over(plan),
    )
    own = model.experts // (experts_over(plan) * plan.axis_size("tensor"))
    stacked = unit.experts / own * stacked_experts(model, plan)
    copied = stacked - unit.experts
    if plan.experts.keep:
        layers_gathered_once = max(layers_gathered_once, layers * stacked / (block + copied))
    return copied, layers_gathered_once
