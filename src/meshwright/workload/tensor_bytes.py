"""Bytes of each memory category on pipeline ranks, as array arithmetic: for the ranks of one plan, or for many layouts.

`plan_bytes` adds up the layers of a plan's ranks one by one, `layout_bytes` counts equal layers; `rank_tensors` does all else for both.

The executor, FSDP2 and the kernels decide which tensors exist when (docs/design/cost-model.md, "Memory"). A rank's memory has its peak at
one of four moments:

1. in the head: logits, and the head's gradients;
2. in the first block's backward, while all activations are still stored: gradients that are being reduced;
3. at the end of the backward: all accumulated gradients, and the copies that are sent to replicas;
4. in the optimizer's update, if it casts gradients to a wider format or collects whole matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.spec.model import ModelSpec
from meshwright.workload.activations import (
    moving_elements,
    prediction_elements,
    received_elements,
    score_gradient_bytes,
)
from meshwright.workload.arrays import Array
from meshwright.workload.buffers import (
    BLOCK_SLOTS,
    RECEIVES_AHEAD,
    STAGING_BUFFERS,
    TOKEN_SLOTS,
    UNITS_IN_FLIGHT,
    staged_elements,
)
from meshwright.workload.layouts import StepDivision
from meshwright.workload.optimizer_work import MUON_BUFFERS

CATEGORIES = ("weights", "gradients", "optimizer", "ema", "gathered", "activations", "logits", "transfers", "framework")
LOSS_BYTES = 4
"""Bytes of a number in the loss's accumulators (fp32)."""


@dataclass(frozen=True, kw_only=True)
class TensorFormats:
    """Bytes per number of a run's tensors, and sizes of its buffers. Fields that say "1 if" are 1 or 0."""

    compute: Array = 2
    """Bytes of a number in forward and backward: gathered weights, activations, gradients."""
    reduce: Array = 4
    """Bytes of a gradient element in a reduction over shard ranks."""
    frozen: Array = 2
    """Bytes of a frozen weight in a block, if weights are not sharded."""
    stored: Array = 4
    """Bytes of a master weight, and of an element of an optimizer state."""
    resident: Array = 2
    """Bytes of the copy of a weight that stays on the device while its optimizer state is in host memory."""
    record: Array = 10.0
    """Bytes of a parameter's optimizer state that are copied between host and device (its record)."""
    offload_fraction: Array = 1.0
    """Share of the offloaded parameters' records that are in host memory; the other records stay on the device."""
    staging: Array = 0.0
    """Bytes on the device into which records are fetched ahead of their update; at least `STAGING_BUFFERS` chunks."""
    summed: Array = 4
    """Bytes of an element of a gradient shard that is summed over micro-batches."""
    sums_on_host: Array = 0
    """1 if these sums are in host memory while no backward adds to them."""
    gathered: Array = 1.0
    """Size of a block's gathered weight, relative to `compute`."""
    low: Array = 1.0
    """Size of a matmul's input that is saved for backward, relative to `compute`."""
    travelling: Array = 0
    """Bytes per element of the gradient copies that replicas all-reduce; 0 if they all-reduce the gradients themselves."""
    logit: Array = 2
    """Bytes of a logit in the loss: the fused kernel overwrites it with its gradient, plain operations add an fp32 copy."""
    mlp_tile: Array = 0
    """Tokens of a tile, if the backward recomputes dense feed-forward networks in tiles; 0 without tiles."""
    chunk: Array = 4096
    """Tokens whose logits exist at once."""
    workspace: Array = 200 << 20
    """Scratch memory of matmuls and attention."""
    scores: Array = 0
    """1 if attention's gradients are summed in a fixed order, because the gradients of scores then need memory."""
    token_window: Array = 1
    """1 if copy engines carry tokens through a persistent window; 0 on CPUs."""
    block_states: Array = 2.0
    """State tensors of the optimizer per parameter of a block, in the stored dtype."""
    embed_head_states: Array = 2.0
    """State tensors of the optimizer per parameter of embedding and head, in the stored dtype."""
    average: Array = 0
    """1 if a moving average of the weights is kept."""
    widens: Array = 0
    """1 if the update first casts all gradients to a wider format. AdamW's kernel needs no such copy."""
    largest_matrix: Array = 0.0
    """Elements of the largest matrix that one rank updates as a whole (Muon); 0 for other optimizers."""
    matrix_elements: Array = 0.0
    """Elements of a layer's matrices that are updated as a whole."""
    matrices: Array = 1.0
    """Number of a layer's matrices that are updated as a whole."""
    framework: Array = 3 << 30
    """Context, communicators, kernels: memory outside tensors."""


@dataclass(frozen=True, kw_only=True)
class RankTensors:
    """What pipeline ranks store; each field is a number or an array with one entry for each rank or layout.

    Parameter counts are those of one tensor rank. Fields that say "1 if" or "1 when" are 1 or 0.
    """

    owned: Array
    """Parameters of the rank's shard. The rank stores their master weights, gradient sums and optimizer states."""
    block: Array
    """Parameters of the largest block when gathered; of its experts only those of this rank."""
    embed_head: Array
    """Parameters of the embedding and the head on this rank."""
    head: Array
    """Parameters of the unit with head and loss; 0 on other ranks."""
    trained: Array = 1.0
    """Share of a block's parameters that is trained; the others are frozen, in the compute dtype and without gradients."""
    embed_head_trained: Array = 1.0
    """Share of the parameters of embedding and head that is trained."""
    shards: Array
    """Ranks over which units are gathered."""
    replicated: Array
    """1 if several ranks have the same shard, and all-reduce its gradients."""
    gathers: Array
    """1 when weights are gathered, or cast to the compute dtype; 0 if one rank computes with its master weights."""
    layers_gathered_once: Array
    """Layers whose gathered weights are kept for the whole step."""
    embed_gathered_once: Array
    """1 when the gathered weights of the embedding are kept for the whole step."""
    last: Array
    """Parameters of the unit gathered last; its buffer is freed at the next gather."""
    sums: Array
    """Bytes of accumulated gradients at the peak of activations.

    It is 0 with one micro-batch, and in layered order, where all micro-batches run through a layer before the next layer: then the peak
    comes before the first gradient.
    """
    sums_shards: Array = 0.0
    """1 when gradient shards are summed over micro-batches (`Plan.sums_shards`)."""
    reduces: Array
    """1 when units reduce their gradients while all activations are still stored."""
    offloaded_share: Array
    """Share of the parameters with the optimizer in host memory.

    The device keeps their shard in the resident dtype, their gradient sum and staging buffers.
    """
    layers: Array
    activations: Array
    """Bytes of activations that unfinished micro-batches saved for their backwards."""
    working: Array
    """Bytes of temporary tensors of the block in backward: recomputed activations, gradients of activations, gathered inputs."""
    tokens: Array
    """Tokens of a micro-batch whose activations the rank stores."""
    tensor_ranks: Array
    """Ranks of the tensor axis."""
    hidden: Array
    """Elements of the residual stream for each token."""
    outputs: Array
    """Outputs of the head for each token: the size of the vocabulary, or 1 for a score."""
    gradients_final: Array
    """1 when gradients are final as the backward makes them (`spec.layout.gradients_final_in_backward`)."""
    pending: Array
    """Micro-batches whose gradients of activations are stored between two units: in layered order all, else 0."""
    pending_head: Array
    """Micro-batches whose gradients of the head's input are stored: all if all forwards come first, else 1."""
    predictions: Array = 0.0
    """Number of prediction modules on the rank; 0 on ranks without the head."""
    prediction_activations: Array = 0.0
    """Bytes of activations of these modules in their backward, for one micro-batch."""
    messages: Array
    """Messages of one micro-batch to other ranks, both directions; negative without a pipeline."""
    window: Array
    """1 if copy engines gather weights into a persistent window."""
    token_slots: Array
    """Hidden vectors for each token of the rank in a slot of the windows through which tensor ranks and expert ranks copy tokens."""


def rank_tensors(
    model: ModelSpec,
    step: StepDivision,
    formats: TensorFormats,
    *,
    block: Array,
    copied: Array = 0.0,
    temporary: Array,
    module_elements: tuple[Array, Array],
    summed: Array,
    whole: Array,
    sends: Array,
    **of_layers: Array,
) -> RankTensors:
    """Return what pipeline ranks store and gather, from sums over their layers.

    - `block`: parameters of the largest block when gathered, without `copied` ones: those of experts of other ranks.
    - `temporary`: bytes of temporary tensors that a block's backward adds to the saved activations.
    - `module_elements`: elements per token of a prediction module's block: (saved by its forward, temporary in its backward).
    - `summed`: trained parameters of the rank's shard whose gradients are reduced after every micro-batch, and summed as shards.
    - `whole`: trained parameters of the units whose gradients are reduced once a step, and summed as whole units.
    - `sends`: messages of one micro-batch to other ranks; it counts only with a pipeline.
    - `of_layers`: further fields of `RankTensors`, which are returned as they are.
    """
    head = of_layers["head"]
    block_trained = block * of_layers["trained"]
    head_trained = head * of_layers["embed_head_trained"]
    received = received_elements(model, step.tensor, step.context)
    moving = moving_elements(model) * step.paired
    scores = score_gradient_bytes(model, step.micro_batch, step.seq / step.context, step.tensor)
    tokens = step.micro_batch * step.seq / step.context / step.tensor
    token_bytes = tokens * formats.compute
    micro_batches = step.micro_batches
    single = 1.0 * (step.pipeline == 1)
    one_replica = step.data * step.context == step.shards
    unsharded = (step.shards == 1) & one_replica & (formats.compute == formats.stored)
    # The gradients of the two micro-batches of a pair are added before the reduction.
    pair = step.paired * formats.reduce * block_trained
    earlier = formats.reduce * whole + sums_beside_activations(
        formats, summed, block_trained, head_trained, step.shards
    )
    sums = np.where(micro_batches > 1 + step.paired, earlier + pair * (whole == 0), pair)
    accumulates = (micro_batches > 1) & (step.layered == 0)
    modules = model.prediction_depth * (head > 0)
    module_saved, module_temporary = module_elements
    module = prediction_elements(model, modules, module_saved, module_temporary + received)
    return RankTensors(
        **of_layers,
        block=block + copied,
        shards=step.shards,
        replicated=1.0 - one_replica,
        gathers=1.0 - unsharded,
        sums=accumulates * sums,
        sums_shards=accumulates * (summed > 0),
        reduces=(summed > 0) | (micro_batches == 1) | (step.layered > 0) | (single > step.forwards_first),
        working=temporary + token_bytes * (received + moving) + formats.scores * scores,
        tokens=tokens,
        tensor_ranks=step.tensor,
        hidden=model.hidden,
        outputs=model.outputs,
        gradients_final=step.gradients_final_in_backward(model.embedding_at_both_ends),
        pending=step.layered * micro_batches,
        pending_head=np.where(step.forwards_first, micro_batches, 1.0 + step.paired),
        predictions=modules,
        prediction_activations=token_bytes * module,
        messages=(1 - single) * sends - single,
        window=step.weights_by_copy_engine,
        token_slots=formats.token_window * step.tokens_by_copy_engine * step.tensor * (step.tensor > 1)
        + model.experts_per_token * step.exchange_room,
    )


def bytes_by_category(rank: RankTensors, formats: TensorFormats) -> dict[str, Array]:
    """Return the bytes of each memory category at the moment of the peak, for each rank or layout.

    `transfers` is 0 without a pipeline, and `ema` without a moving average of the weights.
    """
    moments = _moments(rank, formats)
    totals = np.stack(np.broadcast_arrays(*(np.asarray(sum(moment.values()), float) for moment in moments)))
    fullest = np.argmax(totals, axis=0)
    at_peak = {
        category: np.choose(fullest, np.broadcast_arrays(*(moment[category] for moment in moments)))
        for category in ("gradients", "gathered", "activations", "logits")
    }
    lasting = _lasting(rank, formats)
    return {category: at_peak[category] if category in at_peak else lasting[category] for category in CATEGORIES}


def peak_bytes(rank: RankTensors, formats: TensorFormats) -> Array:
    """Return the sum of `bytes_by_category`. This takes a third of the time that the categories take."""
    peak, *others = (sum(moment.values()) for moment in _moments(rank, formats))
    for other in others:
        peak = np.maximum(peak, other)
    return peak + sum(_lasting(rank, formats).values())


def _moments(rank: RankTensors, formats: TensorFormats) -> tuple[dict[str, Array], ...]:
    """Return the bytes at the four moments at which memory may have its peak, for the categories that differ between the moments."""
    stream = rank.tokens * rank.hidden * formats.compute
    gathered = _gathered_weights(rank, formats)
    return (
        _head_moment(rank, formats, stream, gathered),
        _first_backward_moment(rank, formats, stream, gathered),
        _backward_end_moment(rank, formats),
        _update_moment(rank, formats),
    )


def _lasting(rank: RankTensors, formats: TensorFormats) -> dict[str, Array]:
    """Return the bytes of the categories that are the same at all moments."""
    stream = rank.tokens * rank.hidden * formats.compute
    on_device = 1 - rank.offloaded_share
    chunk_elements = np.minimum(staged_elements(formats.record), rank.owned * rank.offloaded_share)
    trained = _trained(rank)
    chunk_elements = np.minimum(chunk_elements, trained * rank.offloaded_share)
    records = trained * rank.offloaded_share * formats.record
    staged = np.minimum(formats.staging, records * formats.offload_fraction)
    staged = np.maximum(staged, STAGING_BUFFERS * formats.record * chunk_elements)
    unstaged = records * (1 - np.asarray(formats.offload_fraction))
    return {
        "weights": trained * (formats.stored * on_device + formats.resident * rank.offloaded_share)
        + _frozen_bytes(rank, formats),
        "optimizer": _states(rank, formats) * on_device * formats.stored + staged + unstaged,
        "ema": trained * formats.stored * formats.average,
        # The buffer of a sent message is freed when the next message is sent.
        "transfers": np.where(rank.messages < 0, 0.0, (RECEIVES_AHEAD + rank.messages) * stream),
        # Buffers that ranks map into each other's memory do not belong to the allocator, so torch's memory statistics do not count them.
        "framework": formats.framework + TOKEN_SLOTS * rank.token_slots * stream,
    }


def _states(rank: RankTensors, formats: TensorFormats) -> Array:
    """Return the elements of all optimizer states of the rank's shard."""
    embed_head = np.minimum(rank.owned, rank.embed_head / rank.shards)
    blocks = formats.block_states * (rank.owned - embed_head) * rank.trained
    return blocks + formats.embed_head_states * embed_head * rank.embed_head_trained


def _frozen_bytes(rank: RankTensors, formats: TensorFormats) -> Array:
    """Return the bytes of the rank's frozen weights. Frozen weights of blocks may be stored in fp8 if they are not sharded."""
    embed_head = np.minimum(rank.owned, rank.embed_head / rank.shards)
    in_blocks = (
        (rank.owned - embed_head) * (1 - rank.trained) * np.where(rank.shards > 1, formats.compute, formats.frozen)
    )
    return in_blocks + embed_head * (1 - rank.embed_head_trained) * formats.compute


def _trained(rank: RankTensors) -> Array:
    """Return how many parameters of the rank's shard are trained."""
    embed_head = np.minimum(rank.owned, rank.embed_head / rank.shards)
    return (rank.owned - embed_head) * rank.trained + embed_head * rank.embed_head_trained


def _gathered_weights(rank: RankTensors, formats: TensorFormats) -> Array:
    """Return the bytes of gathered weights and of the buffer of the last gather."""
    blocks = np.maximum(rank.layers_gathered_once, np.minimum(UNITS_IN_FLIGHT, rank.layers)) * rank.block
    # Without sharding, frozen weights are used where they are and need no gathered copy.
    blocks = blocks * formats.gathered * np.where(rank.shards > 1, 1.0, rank.trained)
    embed_head = np.where(rank.embed_gathered_once > 0, rank.embed_head, rank.head) * np.where(
        rank.shards > 1, 1.0, rank.embed_head_trained
    )
    return rank.gathers * (blocks + embed_head) * formats.compute + _buffers(rank, formats, rank.last)


def _buffers(rank: RankTensors, formats: TensorFormats, last: Array) -> Array:
    """Return the bytes of the buffers for gathers: the buffer of the last gather (`last` parameters), or the window of copy engines."""
    larger_of_embed_head = np.maximum(rank.head, rank.embed_head - rank.head)
    buffer_elements = np.where(rank.window > 0, BLOCK_SLOTS * rank.block + larger_of_embed_head, last)
    return rank.gathers * np.where(rank.shards > 1, buffer_elements, 0.0) * formats.compute


def _head_moment(rank: RankTensors, formats: TensorFormats, stream: Array, gathered: Array) -> dict[str, Array]:
    """Return the bytes while the head computes: the logits of a chunk, and the fp32 gradient of the head's weight."""
    # Each tensor rank computes logits for the tokens of all tensor ranks, but only for its part of the vocabulary.
    tokens_at_once = np.minimum(rank.tokens * rank.tensor_ranks, formats.chunk)
    outputs_per_rank = rank.outputs / rank.tensor_ranks
    logit_bytes = tokens_at_once * outputs_per_rank * formats.logit
    table_parameters = outputs_per_rank * rank.hidden
    # A chunk's matmul is added to the weight gradient inside the matmul. Each use of the head keeps its weight gradient
    # until the backward of the loss, which scales one into the compute dtype when the logits are freed. Measured on an
    # H200 for 3B and 8B.
    table_parameters = table_parameters * rank.embed_head_trained
    scaled = table_parameters * formats.compute
    gradients = (1 + np.asarray(rank.predictions)) * table_parameters
    table_gradients = gradients * np.maximum(LOSS_BYTES, formats.compute) + np.where(
        rank.pending > 0, table_parameters * formats.reduce, 0.0
    )
    head_bytes = np.maximum(logit_bytes, scaled) + table_gradients + stream * (1 + np.maximum(1.0, rank.pending_head))
    return {
        "gradients": rank.sums,
        "gathered": gathered,
        "activations": rank.activations + rank.prediction_activations + rank.pending * stream + formats.workspace,
        "logits": np.where(rank.head > 0, head_bytes, 0.0),
    }


def _first_backward_moment(
    rank: RankTensors, formats: TensorFormats, stream: Array, gathered: Array
) -> dict[str, Array]:
    """Return the bytes in the first backward of a block, where a reduction buffer exists together with the block's gradients.

    It is the buffer of the head or of another block. On the first rank of a pipeline it may be that of the embedding, with which the
    backward of the previous micro-batch has ended.
    """
    # Without sharding, a gradient is added to the earlier sum without a buffer.
    reduces = rank.reduces * ((rank.shards > 1) | (rank.sums == 0))
    # The head's own gradient; a tied one has a buffer until the embedding's is added.
    has_gradient = rank.head < rank.embed_head
    gradient = np.where(rank.gradients_final > 0, formats.compute, formats.reduce) / rank.shards
    embedding = np.where((rank.head > 0) | (rank.messages < 0), 0.0, rank.embed_head)
    # Buffers of the communication stream are freed to that stream's pool, which compute cannot allocate from.
    buffers = np.where((rank.shards > 1) | (rank.gradients_final <= 0), formats.reduce, 0.0)
    head = rank.head * rank.embed_head_trained
    block = rank.block * rank.trained
    without_head = np.maximum(embedding * rank.embed_head_trained, block) * (buffers + gradient)
    reduced = reduces * np.maximum(head * (buffers + has_gradient * gradient), without_head)
    computed = block * (formats.compute + np.where(rank.pending > 0, formats.reduce, 0.0))
    return {
        "gradients": rank.sums,
        "gathered": gathered + rank.gathers * (reduced + computed),
        "activations": rank.activations + rank.working + rank.pending * stream + formats.workspace,
        "logits": np.where(rank.head > 0, stream * np.maximum(1.0, rank.pending_head), 0.0),
    }


def _backward_end_moment(rank: RankTensors, formats: TensorFormats) -> dict[str, Array]:
    """Bytes at the end of backward: all gradients and no activations."""
    end = np.maximum(rank.head, rank.embed_head - rank.head)
    unit = np.maximum(end * rank.embed_head_trained, rank.block * rank.trained)
    unsharded = np.where(rank.gradients_final > 0, 0.0, UNITS_IN_FLIGHT * formats.reduce)
    buffers = np.where(rank.shards > 1, UNITS_IN_FLIGHT * formats.reduce, unsharded)
    return {
        "gradients": _trained(rank) * (_gradient_bytes(rank, formats) + rank.replicated * formats.travelling),
        "gathered": rank.gathers * unit * (formats.compute + buffers) + _buffers(rank, formats, 0.0 * rank.last),
        "activations": formats.workspace + 0.0 * rank.activations,
        "logits": 0.0 * rank.activations,
    }


def _update_moment(rank: RankTensors, formats: TensorFormats) -> dict[str, Array]:
    """Bytes in the update: gradients, those that are cast to the stored dtype, and whole matrices of a rank."""
    ranks = np.maximum(1.0, rank.shards * rank.tensor_ranks)
    whole = np.maximum(
        formats.largest_matrix, formats.matrix_elements / np.minimum(ranks, np.maximum(1.0, formats.matrices))
    )
    gradient = _gradient_bytes(rank, formats)
    cast = np.where(gradient < formats.stored, formats.widens * formats.stored, 0.0)
    return {
        "gradients": _trained(rank) * (gradient + cast),
        "gathered": whole * MUON_BUFFERS * formats.compute + 0.0 * rank.owned,
        "activations": formats.workspace + 0.0 * rank.activations,
        "logits": 0.0 * rank.activations,
    }


def _gradient_bytes(rank: RankTensors, formats: TensorFormats) -> Array:
    """Return the bytes per element of a gradient shard after its last reduction."""
    reduced = np.where(np.asarray(rank.sums_shards) > 0, formats.summed, formats.stored)
    return np.where(rank.gradients_final > 0, formats.compute, reduced)


def sums_beside_activations(formats: TensorFormats, summed: Array, block: Array, head: Array, shards: Array) -> Array:
    """Return the bytes of gradient sums on the device at the peak of activations, for shards of `summed` parameters in all.

    If the sums are in host memory, the device has those of three units at a time: one is copied to the host, one is copied to the device,
    and one is added to. The formula assumes the head or a block, and two more blocks; `head` and `block` are whole units.

    800 parameters are summed in host memory with 4 bytes each, on 2 shard ranks. The device has the head (50 parameters) and two blocks
    (30 each), which are 110 · 4 / 2 bytes:

    >>> from types import SimpleNamespace
    >>> host = SimpleNamespace(summed=4.0, sums_on_host=1)
    >>> float(sums_beside_activations(host, summed=800, block=30, head=50, shards=2))
    220.0
    """
    on_device = (np.maximum(head, block) + 2 * block) / shards
    return formats.summed * np.where(np.asarray(formats.sums_on_host) > 0, np.minimum(summed, on_device), summed)
