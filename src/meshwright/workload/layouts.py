"""`Layouts`: how ranks divide a training step, as columns. Each column is a number for one plan, or a NumPy array for many plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from meshwright.schedules.idle_time import relative_idle_time
from meshwright.schedules.in_flight import NAMES, in_flight
from meshwright.spec.blocks.attention import FLASH_FORMATS
from meshwright.spec.job import TrainSpec
from meshwright.spec.layout import V_SCHEDULES, Layout, stage_table
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import RECOMPUTE_MODES, SHARD_AXES, AxisName, LayerStrategy, Plan, Precision
from meshwright.workload.arrays import Array
from meshwright.workload.dtypes import bytes_of, staging_bytes, state_bytes
from meshwright.workload.expected_loads import expected_busiest
from meshwright.workload.groups import experts_over
from meshwright.workload.optimizer_work import ADAMW_BYTES, optimizer_columns
from meshwright.workload.rank_layers import RankLayers, table_layers

SELECTIVE, ALL_BUT_ATTENTION, FULL = (
    float(RECOMPUTE_MODES.index(mode)) for mode in ("selective", "all_but_attention", "full")
)
"""Values of `Layouts.recompute`. From `ALL_BUT_ATTENTION` on, the backward repeats the matmuls of the forward."""
GPIPE, BREADTH_FIRST, PAIRED = map(NAMES.index, ("gpipe", "breadth_first", "paired"))
"""Schedules by index."""


@dataclass(frozen=True, kw_only=True)
class StepDivision:
    """How ranks and micro-batches divide a step. Columns that say "1 if" are 1 or 0."""

    tensor: Array
    """Tensor ranks."""
    pipeline: Array
    """Pipeline ranks."""
    context: Array
    """Context ranks, ring and Ulysses together."""
    data: Array
    """Data-parallel ranks: shards and replicas."""
    shards: Array
    """Ranks that share the sharded states (at most data × context)."""
    micro_batch: Array
    """Sequences of a micro-batch."""
    global_batch: Array
    """Sequences of a step, on all ranks."""
    seq: Array
    """Tokens of a sequence."""
    forwards_first: Array = 0.0
    """1 if the forwards of all micro-batches come before all backwards, as in GPipe and in layered order."""
    layered: Array = 0.0
    """1 if all micro-batches pass a layer before the next layer is gathered (breadth-first accumulation)."""
    paired: Array = 0.0
    """1 if two micro-batches pass through each layer together: one computes while the tokens of the other are exchanged."""
    weights_by_copy_engine: Array = 0.0
    """1 if copy engines gather weights; their gathers do not wait for NCCL collectives."""
    tokens_by_copy_engine: Array = 0.0
    """1 if copy engines carry the tokens between tensor ranks, at the same time as the matmuls."""
    exchange_room: Array = 0.0
    """Rows that the receive buffers of a rank hold, as a multiple of the rows that the rank sends (`expected_loads.received_room`)."""

    @property
    def ranks(self) -> Array:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def micro_batches(self) -> Array:
        """Micro-batches of one replica in one step."""
        return np.maximum(1.0, np.ceil(self.global_batch / (self.data * self.micro_batch) - 1e-9))

    def gradients_final_in_backward(self, tied: Array) -> Array:
        """For which layouts `spec.layout.gradients_final_in_backward` holds; `tied` as in `Shape`."""
        return (self.micro_batches <= 1) & (self.ranks == self.pipeline) & ((self.pipeline == 1) | (tied == 0))


@dataclass(frozen=True, kw_only=True)
class Layouts(StepDivision):
    """How a step is divided, and what else its time and memory depend on. Columns that say "1 if" are 1 or 0."""

    virtual: Array
    """Stages on each pipeline rank; more than 1 with virtual stages."""
    expert: Array
    """Ranks that divide the experts of a layer, tensor ranks included."""
    zero: Array
    """What is sharded: 0 nothing, 1 the optimizer state, 2 also gradients, 3 also weights."""
    recompute: Array
    """Index in `RECOMPUTE_MODES`. In published runs, `selective` recomputes only scores, softmax and weighted sums of attention."""
    keep_gathered: Array = 0.0
    """1 if gathered weights are kept from forward to backward."""
    gathered_bytes: Array = 2.0
    """Bytes per element of a block's gathered weight."""
    gather_once: Array = 0.0
    """1 if gathered weights are kept for the whole step, all its micro-batches."""
    reduce_once: Array = 0.0
    """1 if gradients are reduced over shards once per step rather than once per micro-batch."""
    replica_bytes: Array = 0.0
    """Bytes per gradient element sent between replicas of sharded weights; 0 selects the stack's constant."""
    fill: Array = 1.0
    """Idle time at beginning and end of the pipeline, relative to 1F1B with as many virtual stages; below 1 only with a split backward."""
    in_flight: Array = 0.0
    """Peak of micro-batches in flight on the first pipeline rank (`schedules.in_flight`)."""
    in_flight_last: Array = 0.0
    """Peak of micro-batches in flight on the last pipeline rank."""
    vee: Array = 0.0
    """1 if the first pipeline rank has embedding and head (schedules with V-shaped placement)."""
    fixed_order: Array = 0.0
    """1 if all sums have a fixed order (train.deterministic)."""
    flash_windows: Array = 0.0
    """1 if FlashAttention computes the windows for which it is faster: in 16 bit, without a fixed order, and on whole sequences."""
    attention: Array = 0.0
    """Share of the 16-bit peak that attention reaches, where a published run states its kernel; 0 selects the generation's constant."""
    unfused: Array = 0.0
    """1 if a published run states that attention keeps its scores in memory."""
    loss_chunk: Array = 4096.0
    """Tokens whose logits exist at once (train.loss_chunk)."""
    objective: Array = 0.0
    """1 if the loss is a function of log-probabilities (`parallel.objective`), which the head then computes before their gradients."""
    further_forwards: Array = 0.0
    """Forwards of each micro-batch without a backward, in addition to the one that is trained (`train.further_forwards`)."""
    offload: Array = 0.0
    """1 when the optimizer's state is in host memory."""
    state_bytes: Array = 12.0
    """Bytes of a parameter's state in host memory on average (`workload.dtypes.state_bytes` x plan.offload_fraction)."""
    staging: Array = 0.0
    """Bytes on a device into which state in host memory is fetched ahead of its update."""
    sums_on_host: Array = 0.0
    """1 when sums of gradient shards over micro-batches are in host memory between the backwards of their unit."""
    update_bytes: Array = ADAMW_BYTES
    """Bytes that the optimizer moves per fp32 parameter (`workload.optimizer_work`)."""
    muon_flops: Array = 0.0
    """FLOPs of Muon's iterations for all matrices of a layer; 0 for other optimizers."""
    muon_largest_flops: Array = 0.0
    """FLOPs of Muon's iterations for the model's largest matrix, which one rank computes alone."""
    muon_elements: Array = 0.0
    """Elements of a layer's matrices that Muon's ranks exchange."""
    offload_activations: Array = 0.0
    """Share of all layers whose saved activations are offloaded to host memory."""
    slowest_rank_ratio: Array = 1.0
    """Compute time of the slowest rank relative to the mean (`benchmarks/stragglers.py`)."""
    ulysses: Array = 1.0
    """Context ranks that exchange tokens for heads (Ulysses). The other factor of `context` is `ring`, the size of attention rings."""
    imbalance: Array = 1.0
    """Tokens of the busiest expert rank relative to the mean."""
    busiest_rows: Array = 1.0
    """Rows of one expert rank over all layers, relative to the mean, for the rank with the most: it must store their activations."""
    exchanged_share: Array = 1.0
    """Rows that the busiest expert rank exchanges, relative to those without copies of experts; 0 if no rows are exchanged."""
    copy_seconds: Array = 0.0
    """Exposed seconds of gathers and reductions of copied experts, of one micro-batch over all layers."""
    one_copy: Array = 0.0
    """1 if each domain with experts of a token receives it once and distributes it inside (DeepEP and similar)."""
    exchange_overlaps: Array = 0.0
    """1 if another micro-batch computes during dispatch and combine (DualPipe and similar)."""
    exchanged_bytes: Array = 2.0
    """Bytes per element of dispatched and combined tokens; 1.5 if only the dispatch is fp8."""
    domains_per_token: Array = 0.0
    """Largest number of domains that the router sends a token to; 0 without a limit."""
    host_sizes: Array = 1.0
    """1 if the host needs the token counts of local experts before it launches their matmuls."""
    layer_graphs: Array = 0.0
    """1 if each layer's forward and backward is launched as one CUDA graph."""
    eager: Array = 0.0
    """1 if element-wise operations run one by one, although the software has a compiler or kernels that fuse them."""
    balanced: Array = 0.0
    """1 if stages balance the cost of layers and head rather than the number of layers."""
    fullest_layers: Array = 0.0
    """Layers of the fullest pipeline rank without the head; 0 selects the rules of published stacks (`costs.stage_layers`)."""
    head_layers: Array = 0.0
    """Layers of the rank with the head."""
    slowest_layers: Array = 0.0
    """As `fullest_layers`, but in time (`workload.rank_layers.RankLayers`)."""
    slowest_head_layers: Array = 0.0
    """As `slowest_layers`, if the rank with the head is the longest in the last round."""
    sequence: Array = 0.0
    """1 with sequence parallelism: tensor ranks divide by sequence the activations that they do not divide by width."""
    port: Array = 1.0
    """Bandwidth of the groups' ports relative to the machine's; below 1 across node groups on a slower network."""
    tensor_stride: Array = 0.0
    """Ranks from one member of an axis's groups to the next (`spec.layout.Layout.stride`).

    0 if axes are ordered tensor, context, shard, replicate, pipeline from the innermost outward.
    """
    ring_stride: Array = 0.0
    ulysses_stride: Array = 0.0
    shard_stride: Array = 0.0
    replicate_stride: Array = 0.0
    pipeline_stride: Array = 0.0

    @property
    def splits_backward(self) -> Array:
        """Whether the pipeline's schedule splits the backward: only such schedules have less idle time than 1F1B."""
        return (self.pipeline > 1) & (self.fill < 1)

    @property
    def expert_shard(self) -> Array:
        """Ranks that the parameters of each expert are split over."""
        return np.maximum(1.0, self.shards * self.tensor / np.maximum(self.expert, 1.0))

    @property
    def tensor_step(self) -> Array:
        """Distance in ranks from one tensor rank to the next. The properties with `_step` below are the distances of the other axes."""
        return np.where(self.tensor_stride > 0, self.tensor_stride, 1.0)

    @property
    def ring(self) -> Array:
        return self.context / self.ulysses

    @property
    def ulysses_step(self) -> Array:
        return np.where(self.ulysses_stride > 0, self.ulysses_stride, self.tensor)

    @property
    def ring_step(self) -> Array:
        return np.where(self.ring_stride > 0, self.ring_stride, self.tensor * self.ulysses)

    @property
    def shard_step(self) -> Array:
        return np.where(self.shard_stride > 0, self.shard_stride, self.tensor)

    @property
    def replicate_step(self) -> Array:
        return np.where(self.replicate_stride > 0, self.replicate_stride, self.tensor * self.shards)

    @property
    def data_step(self) -> Array:
        """Distance between data-parallel ranks (shards and replicas), the mean if other axes lie between them."""
        ranks = self.data * self.context
        span = np.maximum(self.shard_step * self.shards, self.replicate_step * np.maximum(1.0, ranks / self.shards))
        has_strides = (self.shard_stride > 0) | (self.replicate_stride > 0)
        return np.where(has_strides, span / ranks, self.tensor)

    @property
    def pipeline_step(self) -> Array:
        return np.where(self.pipeline_stride > 0, self.pipeline_stride, self.tensor * self.context * self.data)


def layout_of(model: ModelSpec, train: TrainSpec, plan: Plan) -> Layouts:
    """Return the columns of a plan, where all layers have the strategy of the first layer."""
    table = stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
    columns = layouts_of(
        model,
        train,
        plan.precision,
        _axis_sizes(plan),
        expert=experts_over(plan),
        schedule=NAMES.index(plan.schedule.name),
        virtual=len(table[0]) if len(table) > 1 else 1,
        micro_batch=plan.batch.micro_batch,
        accumulate=plan.batch.accumulate,
        layers=table_layers(table),
        weights_by_copy_engine=plan.gather_transport == "copy_engine",
        tokens_by_copy_engine=plan.tensor_transport == "copy_engine",
        offload_fraction=plan.offload_fraction,
        offload_staging=plan.offload_staging,
        sums_on_host=plan.accumulation == "host" and plan.sums_shards(plan.layers[0]),
        **_strides(plan),
        **strategy_columns(plan.layers[0]),
    )
    return Layouts(**{field.name: float(getattr(columns, field.name)) for field in fields(Layouts)})


def division_of(train: TrainSpec, plan: Plan, exchange_room: float) -> StepDivision:
    """Return the columns of a plan that do not depend on its layers, for a fiftieth of the time of `layout_of`."""
    return StepDivision(
        weights_by_copy_engine=plan.gather_transport == "copy_engine",
        tokens_by_copy_engine=plan.tensor_transport == "copy_engine",
        exchange_room=exchange_room,
        **_division(
            train,
            _axis_sizes(plan),
            NAMES.index(plan.schedule.name),
            plan.batch.micro_batch,
            plan.batch.accumulate,
        ),
    )


def _axis_sizes(plan: Plan) -> Callable[[AxisName], int]:
    # Weights and gradients are divided over hybrid ranks as over shard ranks.
    return lambda axis: plan.axis_size(axis) * (plan.axis_size("hybrid") if axis == "shard" else 1)


def _division(
    train: TrainSpec, size: Callable[[AxisName], Array], schedule: Array, micro_batch: Array, accumulate: Array
) -> dict[str, Array]:
    context = size("context_ring") * size("context_ulysses")
    data_ranks = size("replicate") * size("shard")
    return {
        "tensor": size("tensor"),
        "pipeline": size("pipeline"),
        "context": context,
        "data": data_ranks,
        "shards": size("shard") * context,
        "micro_batch": micro_batch,
        "global_batch": data_ranks * micro_batch * accumulate,
        "seq": float(train.seq_len),
        "forwards_first": 1.0 * ((schedule == GPIPE) | (schedule == BREADTH_FIRST)),
        "layered": 1.0 * (schedule == BREADTH_FIRST),
        "paired": 1.0 * (schedule == PAIRED),
    }


def layouts_of(
    model: ModelSpec,
    train: TrainSpec,
    precision: Precision,
    size: Callable[[AxisName], Array],
    *,
    expert: Array,
    schedule: Array,
    virtual: Array,
    micro_batch: Array,
    accumulate: Array,
    layers: RankLayers,
    offload_fraction: float = 1.0,
    offload_staging: float = 0.0,
    **columns: Array,
) -> Layouts:
    """Return the columns of one or many plans.

    - `size(axis)`: ranks of an axis.
    - `expert`: ranks that share the experts of one tensor rank.
    - `schedule`: index in `schedules.in_flight.NAMES`.
    - `layers`: layers of the pipeline ranks.
    - `columns`: further columns of `Layouts`, which are returned as they are.
    """

    def ranks(axis: AxisName) -> np.ndarray:
        return np.asarray(size(axis), float)

    division = _division(train, ranks, schedule, np.asarray(micro_batch, float), accumulate)
    tensor = ranks("tensor")
    pipeline = ranks("pipeline")
    expert = expert * tensor if model.experts else 1.0
    schedule_arguments = (schedule, pipeline, accumulate, virtual)
    busiest = expected_busiest(model, train, expert)
    return Layouts(
        **division,
        virtual=np.asarray(virtual, float),
        ulysses=ranks("context_ulysses"),
        expert=expert,
        imbalance=busiest.imbalance,
        busiest_rows=busiest.stored_rows,
        zero=np.where(division["shards"] > 1, 3.0, 0.0),
        sequence=np.where(tensor > 1, 1.0, 0.0),
        vee=np.where(np.isin(schedule, [NAMES.index(name) for name in V_SCHEDULES]), 1.0, 0.0),
        fullest_layers=layers.fullest,
        head_layers=layers.with_head,
        slowest_layers=layers.slowest,
        slowest_head_layers=layers.slowest_with_head,
        in_flight=in_flight(*schedule_arguments),
        in_flight_last=in_flight(*schedule_arguments, pipeline - 1),
        fill=relative_idle_time(schedule, pipeline, accumulate),
        fixed_order=float(train.deterministic),
        flash_windows=np.where(
            np.asarray(size("context_ring")) > 1,
            0.0,
            float(precision.compute in FLASH_FORMATS and not train.deterministic),
        ),
        loss_chunk=float(train.loss_chunk),
        objective=float(train.objective),
        further_forwards=float(train.further_forwards),
        gathered_bytes=gathered_bytes(precision),
        state_bytes=offload_fraction * state_bytes(precision),
        staging=staging_bytes(offload_staging, precision),
        replica_bytes=float(bytes_of(precision.reduce_replicas or precision.stored)),
        **optimizer_columns(model, train.optimizer),
        **columns,
    )


def gathered_bytes(precision: Precision) -> float:
    """Return the bytes per element of a block's gathered weight. The closed form knows only one byte and two bytes (bf16).

    Weights are gathered as one byte only if the matmuls use fp8 with one scale per tensor:

    >>> gathered_bytes(Precision(gather="fp8", linear="fp8_tensorwise")), gathered_bytes(Precision())
    (1.0, 2.0)
    """
    return 1.0 if precision.gather == "fp8" and precision.linear == "fp8_tensorwise" else 2.0


def strategy_columns(layer: LayerStrategy, offloaded_share: float = 1.0) -> dict[str, float]:
    """Return the columns that follow from a layer's strategy.

    `offloaded_share` is the share of all layers that offload their activations; it counts only if this strategy offloads activations.

    A layer that keeps its gathered weights for the whole step, and recomputes everything:

    >>> strategy_columns(LayerStrategy(reshard=False, recompute="full"))["gather_once"]
    1.0
    """
    return {
        "recompute": float(RECOMPUTE_MODES.index(layer.recompute)),
        "keep_gathered": float(not layer.reshard),
        "gather_once": float(not layer.reshard),
        "reduce_once": float(layer.gradients == "whole"),
        "offload": float(layer.optimizer_offloaded),
        "offload_activations": offloaded_share * layer.activations_offloaded,
    }


def _strides(plan: Plan) -> dict[str, float]:
    """Return the stride columns: for each axis, the distance in ranks from one member of a group to the next."""
    layout = Layout.of(plan, plan.ranks)
    return {
        "tensor_stride": layout.stride("tensor"),
        "ring_stride": layout.stride("context_ring"),
        "ulysses_stride": layout.stride("context_ulysses"),
        "shard_stride": layout.stride(*SHARD_AXES),
        "replicate_stride": layout.stride("replicate"),
        "pipeline_stride": layout.stride("pipeline"),
    }
